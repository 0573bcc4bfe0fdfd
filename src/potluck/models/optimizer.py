"""How trained tensors are updated, alike in pools and in split training: the optimizer, and the rate of each step."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from lion_pytorch import Lion
from torch import Tensor

from potluck.job_sections import OptimizerName

MOMENTS: dict[OptimizerName, int] = {"adamw": 2, "lion": 1}
"""Values that each keeps of every trained element from step to step."""
_SLICE = 1 << 18
"""Elements that Lion steps at once: it needs twice as many beside them for a moment, which stay in the cache."""


class Schedule(Protocol):
    """What the learning rate of a step follows from."""

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        ...

    @property
    def schedule(self) -> str:
        """``constant``, ``linear`` or ``cosine``."""
        ...

    @property
    def warmup(self) -> float:
        """Part of the steps over which the rate rises from zero."""
        ...


def scheduled(settings: Schedule, step: int) -> float:
    """The learning rate's factor at a 0-based step: a linear rise, then the schedule over the steps that are left."""
    rise = math.ceil(settings.warmup * settings.steps)
    if step < rise:
        return (step + 1) / rise
    progress = (step - rise) / max(1, settings.steps - rise)
    factors: dict[str, Callable[[], float]] = {
        "constant": lambda: 1.0,
        "linear": lambda: 1 - progress,
        "cosine": lambda: 0.5 * (1 + math.cos(math.pi * progress)),
    }
    return factors[settings.schedule]()


def optimizer_of(
    tensors: Sequence[Tensor], kind: OptimizerName, learning_rate: float, weight_decay: float
) -> torch.optim.Optimizer | None:
    """The optimizer of these tensors; vectors do not decay. None where nothing is trained.

    ``adamw``: Loshchilov and Hutter, 2019. ``lion``: Chen et al., 2023, which steps by the sign of a mean of gradients
    and keeps one moment instead of two. Both treat each element by itself, so that any cut of a tensor is stepped as
    the whole one is. Statistics of rows and columns, as Adafactor keeps them, would be sums over the devices that hold
    parts of them.
    """
    groups = [
        {"params": [t for t in tensors if t.ndim > 1], "weight_decay": weight_decay},
        {"params": [t for t in tensors if t.ndim <= 1], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    if not used:
        return None
    if kind == "lion":
        lion = Lion(used, lr=learning_rate)
        lion.update_fn = _in_slices(lion.update_fn)
        optimizer: torch.optim.Optimizer = lion
        return optimizer
    return torch.optim.AdamW(used, lr=learning_rate, fused=True)


def _in_slices(update: Callable[..., None]) -> Callable[..., None]:
    """An elementwise update in place, of some rows of a tensor after others, so that what it makes on its way is small.

    ``update`` is given the values, their gradient and their moment, all of one shape, and the settings of the step.
    """

    def sliced(values: Tensor, gradient: Tensor, moment: Tensor, *settings: float) -> None:
        if values.numel() <= _SLICE:
            update(values, gradient, moment, *settings)
            return
        rows = max(1, _SLICE * len(values) // values.numel())
        for some in zip(*(each.split(rows) for each in (values, gradient, moment)), strict=True):
            update(*some, *settings)

    return sliced
