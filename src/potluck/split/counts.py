"""How many examples of each client a step takes, so that each epoch takes every example once."""

from collections.abc import Sequence

import numpy as np


def step_counts(examples: Sequence[int], batch_size: int, steps: int) -> list[list[int]]:
    """For each client, its examples in each of ``steps`` steps.

    All clients' examples are laid out evenly over an epoch, like teeth of combs of different spacing; a step takes the
    next ``batch_size`` of an epoch, the last one what is left.
    """
    places = np.concatenate([np.empty(0), *((np.arange(own) + 0.5) / own for own in examples)])
    client_of = np.repeat(np.arange(len(examples)), examples)[np.argsort(places, kind="stable")]
    per_epoch = max(1, -(-len(client_of) // batch_size))
    step_of = np.arange(len(client_of)) // batch_size
    epoch = np.zeros((len(examples), per_epoch), dtype=np.int64)
    np.add.at(epoch, (client_of, step_of), 1)
    taken: list[list[int]] = epoch[:, np.arange(steps) % per_epoch].tolist()
    return taken
