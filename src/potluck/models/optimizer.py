"""How trained tensors are updated, alike in pools and in split training: AdamW, and the rate of each step."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


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


def adamw(tensors: Sequence[Tensor], learning_rate: float, weight_decay: float) -> torch.optim.AdamW | None:
    """AdamW (Loshchilov and Hutter, 2019); vectors do not decay. None where nothing is trained."""
    groups = [
        {"params": [t for t in tensors if t.ndim > 1], "weight_decay": weight_decay},
        {"params": [t for t in tensors if t.ndim <= 1], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=learning_rate, fused=True) if used else None
