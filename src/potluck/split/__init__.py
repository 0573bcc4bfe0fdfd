"""Split training: clients run the embedding and the first blocks, a server trains the rest."""
