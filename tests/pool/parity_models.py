"""Tiny models with the plain runs that parity tests compare with, each made once."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from pool.plain import PlainRun, exact_norms, plain_run
from pool.tiny import config, save_tiny
from potluck.models.checkpoint import Checkpoint
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch

LEARNING_RATE, CLIP = 1e-2, 0.5

WEIGHTS_WITHIN = 1e-8
"""How far trained weights may be from the plain ones. Losses and gradients agree to 1e-9; AdamW divides a gradient by
its size plus 1e-8, so that where a gradient is nearly zero a rounding of 1e-15, another on each kind of processor,
moves a weight by 1e-7 of the learning rate a step."""

Steps = list[list[Batch]]
"""The micro-batches of each optimizer step."""


class Models:
    """By family and whether embeddings are tied; runs also by what is trained and on which of ``steps``."""

    def __init__(self, root: Path, steps: Mapping[str, Callable[[], Steps]]) -> None:
        self._root, self._steps = root, steps
        self.directory = cache(self._directory)
        self.plain = cache(self._plain)
        self.checkpoint = cache(lambda family, tied=True: Checkpoint.open(self.directory(family, tied)))

    def _directory(self, family: str, tied: bool) -> Path:
        return save_tiny(config(family, tie_word_embeddings=tied), self._root / f"{family}-{tied}")

    def _plain(self, family: str, tied: bool, targets: tuple[str, ...] | None, steps: str, **differs: Any) -> PlainRun:
        with exact_norms():
            return plain_run(
                self.directory(family, tied),
                self._steps[steps](),
                targets=None if targets is None else list(targets),
                learning_rate=LEARNING_RATE,
                clip=CLIP,
                **differs,
            )


def far(ours: Tensor, plain: Tensor) -> float:
    """The largest difference, relative to the largest value where that is above 1."""
    if not ours.numel():
        return 0.0
    return float((ours - plain).abs().max()) / max(1.0, float(plain.abs().max()))


def turns_of(batches: Sequence[Batch], owners: Sequence[int], rank: int) -> list[Turn]:
    """A step's batches dealt to owners in turn, as ``rank`` has them."""
    dealt = [(owner, batches[i :: len(owners)]) for i, owner in enumerate(owners)]
    return [Turn(owner, own if owner == rank else None) for owner, own in dealt if own]
