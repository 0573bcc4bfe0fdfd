"""Which examples each optimizer step takes: shuffled, near in length, resumable from any step."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_WINDOW_BATCHES = 32
"""Batches among which lengths are sorted: enough for little padding, few enough to leave batches random."""


class Order:
    """The examples of every optimizer step, as a function of the step alone.

    Each epoch is a new permutation drawn from (seed, epoch). Windows of it are sorted by length and cut into batches,
    and the batches are shuffled; where ``batch_size`` does not divide the examples, the smaller batch is the last.
    Only the raw PCG64 stream and stable sorts are used, which numpy keeps the same across versions and platforms.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int) -> None:
        """Prepare the order.

        Args:
            lengths: tokens of each example.
            batch_size: examples an optimizer step.
            seed: any integer.

        Raises:
            ValueError: there is no example, or ``batch_size`` is below 1.
        """
        if not lengths or batch_size < 1:
            raise ValueError(f"an order needs examples and a batch size: {len(lengths)} examples, {batch_size} a batch")
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._batch_size = batch_size
        self._seed = seed % 2**64
        self._epoch = -1
        self._batches: list[list[int]] = []

    @property
    def batches_per_epoch(self) -> int:
        """Optimizer steps an epoch."""
        return -(-len(self._lengths) // self._batch_size)

    def indices(self, step: int) -> list[int]:
        """The examples of optimizer step ``step`` (from 0, running on through epochs), shortest first.

        Raises:
            ValueError: ``step`` is negative.
        """
        if step < 0:
            raise ValueError(f"steps are counted from 0: {step}")
        epoch, batch = divmod(step, self.batches_per_epoch)
        if epoch != self._epoch:
            self._epoch, self._batches = epoch, self._batches_of(epoch)
        return list(self._batches[batch])

    def _batches_of(self, epoch: int) -> list[list[int]]:
        random = np.random.PCG64(np.random.SeedSequence([self._seed, epoch]))
        shuffled = _permutation(random, len(self._lengths))
        whole = len(shuffled) - len(shuffled) % self._batch_size
        window = _WINDOW_BATCHES * self._batch_size
        batches = [
            indices[start : start + self._batch_size]
            for first in range(0, whole, window)
            for indices in [self._by_length(shuffled[first : min(first + window, whole)])]
            for start in range(0, len(indices), self._batch_size)
        ]
        ordered = [batches[i].tolist() for i in _permutation(random, len(batches))]
        rest = self._by_length(shuffled[whole:]).tolist()
        return [*ordered, rest] if rest else ordered

    def _by_length(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        return indices[np.argsort(self._lengths[indices], kind="stable")]


def micro_batches(indices: Sequence[int], size: int) -> list[list[int]]:
    """Consecutive parts of a step's examples, ``size`` each, the last perhaps fewer.

    Raises:
        ValueError: ``size`` is below 1.
    """
    if size < 1:
        raise ValueError(f"a micro-batch needs a size of at least 1: {size}")
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def _permutation(random: np.random.PCG64, n: int) -> NDArray[np.int64]:
    return np.argsort(random.random_raw(n), kind="stable") if n else np.zeros(0, dtype=np.int64)
