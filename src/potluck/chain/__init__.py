"""The model as a chain of pieces with a message after each, and the ways to walk it.

Read in this order: ``piece`` (what a chain is made of), ``walk`` (forward and backward, by hand), ``comm`` (the
messages and their clocks), ``loss`` (the head, cut over the vocabulary), ``classifier`` (the head of a whole sequence)
and ``heads`` (either of them); then the pieces themselves: ``linear``, ``attention``, ``mlp``, ``residual``,
``embedding``.
"""
