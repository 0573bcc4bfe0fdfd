"""Whose examples each step trains on: owners of data take turns, and each knows whose turn it is without a word."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.texts.batch import Batch


@dataclass(frozen=True)
class Turn:
    """One owner's part of an optimizer step."""

    owner: int
    """Its rank."""
    batches: Sequence[Batch] | None
    """Its micro-batches; None on every device but the owner."""


class Turns:
    """The turns of every step, as every device computes them from the numbers of examples alone.

    With K owners a step takes K turns of ``batch_size / K`` examples, rounded up. In each round of an epoch every owner
    that has examples left takes one turn; who has run out is passed over, and the others go on. An epoch takes each
    example once, and ends with a step of fewer turns where they do not come out even.
    """

    def __init__(self, examples: Sequence[int], batch_size: int) -> None:
        """Prepare the turns.

        Args:
            examples: how many each rank owns; 0 where it owns none.
            batch_size: examples an optimizer step.

        Raises:
            ValueError: nobody owns an example, or ``batch_size`` is below 1.
        """
        self.owners = tuple(rank for rank, count in enumerate(examples) if count)
        if not self.owners or batch_size < 1:
            raise ValueError(f"turns need examples and a batch size: {list(examples)}, {batch_size} a batch")
        self.examples_a_turn = math.ceil(batch_size / len(self.owners))
        self._turns_of = {rank: math.ceil(examples[rank] / self.examples_a_turn) for rank in self.owners}
        rounds = range(max(self._turns_of.values()))
        self._epoch = [(rank, r) for r in rounds for rank in self.owners if r < self._turns_of[rank]]

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every example comes once."""
        return math.ceil(len(self._epoch) / len(self.owners))

    def of(self, step: int) -> list[tuple[int, int]]:
        """``(owner, which of its turns)`` for the optimizer step ``step`` (from 0); an owner's turns count on through
        epochs, as the steps of a :class:`potluck.texts.order.Order` do.
        """
        epoch, at = divmod(step, self.steps_per_epoch)
        K = len(self.owners)
        return [(owner, epoch * self._turns_of[owner] + r) for owner, r in self._epoch[at * K : (at + 1) * K]]

    def run_out_after(self, step: int) -> list[int]:
        """Owners whose last example of the epoch comes in ``step`` while others have more."""
        at = step % self.steps_per_epoch
        if at == self.steps_per_epoch - 1:
            return []
        return [owner for owner, turn in self.of(step) if turn % self._turns_of[owner] == self._turns_of[owner] - 1]
