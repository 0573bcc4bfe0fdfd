"""How a step's work is shared: one file a strategy, each a way to walk the same chain."""
