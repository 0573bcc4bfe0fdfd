"""How trained tensors are updated, alike in pools and in split training: the optimizer, and the rate of each step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from lion_pytorch.lion_pytorch import update_fn
from torch import Tensor
from torch.optim.adamw import adamw

from potluck.job_sections import OptimizerName

MOMENTS: dict[OptimizerName, int] = {"adamw": 2, "lion": 1}
"""Values that each keeps of every trained element from step to step."""
State = dict[Tensor, dict[str, Tensor]]
"""What is kept of each tensor from step to step."""
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


@dataclass(frozen=True)
class Group:
    """Tensors that decay alike."""

    tensors: tuple[Tensor, ...]
    weight_decay: float

    def given(self) -> list[tuple[Tensor, Tensor]]:
        """Those that have a gradient, each with it."""
        return [(t, t.grad) for t in self.tensors if t.grad is not None]


@dataclass(frozen=True, eq=False)
class Optimizer:
    """Steps tensors in place, without torch's own classes: making one of them imports torch's compiler."""

    kind: OptimizerName
    groups: tuple[Group, ...]
    state: State = field(default_factory=dict)
    """Of each tensor once it was stepped, by the libraries' names: ``exp_avg``, and for AdamW ``exp_avg_sq``, both of
    the tensor's shape and dtype, and the number of its steps so far, ``step``, a float32 scalar on its device."""

    def gradients(self) -> list[Tensor]:
        """Of all tensors that have one."""
        return [gradient for group in self.groups for _, gradient in group.given()]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Step the tensors that have a gradient; the others, their moments and their decay stand still."""
        update = {"adamw": _adamw, "lion": _lion}[self.kind]
        for group in self.groups:
            update(group, self.state, learning_rate)


def optimizer_of(tensors: Sequence[Tensor], kind: OptimizerName, weight_decay: float) -> Optimizer | None:
    """The optimizer of these tensors; vectors do not decay. None where nothing is trained.

    ``adamw``: Loshchilov and Hutter, 2019. ``lion``: Chen et al., 2023, which steps by the sign of a mean of gradients
    and keeps one moment instead of two. Both treat each element by itself, so that any cut of a tensor is stepped as
    the whole one is. Statistics of rows and columns, as Adafactor keeps them, would be sums over the devices that hold
    parts of them.
    """
    groups = (
        Group(tuple(t for t in tensors if t.ndim > 1), weight_decay),
        Group(tuple(t for t in tensors if t.ndim <= 1), 0.0),
    )
    used = tuple(group for group in groups if group.tensors)
    return Optimizer(kind, used) if used else None


def _adamw(group: Group, state: State, learning_rate: float) -> None:
    given = group.given()
    for t, _ in given:
        if t not in state:
            step = torch.zeros((), dtype=torch.float32, device=t.device)  # where the fused step reads it
            state[t] = {"step": step, "exp_avg": torch.zeros_like(t), "exp_avg_sq": torch.zeros_like(t)}
    adamw(
        [t for t, _ in given],
        [gradient for _, gradient in given],
        [state[t]["exp_avg"] for t, _ in given],
        [state[t]["exp_avg_sq"] for t, _ in given],
        [],
        [state[t]["step"] for t, _ in given],
        fused=True,
        amsgrad=False,
        beta1=0.9,
        beta2=0.999,
        lr=learning_rate,
        weight_decay=group.weight_decay,
        eps=1e-8,
        maximize=False,
    )


def _lion(group: Group, state: State, learning_rate: float) -> None:
    for t, gradient in group.given():
        if t not in state:
            state[t] = {"exp_avg": torch.zeros_like(t)}
        for values, its_gradient, moment in _slices(t, gradient, state[t]["exp_avg"]):
            update_fn(values, its_gradient, moment, learning_rate, group.weight_decay, 0.9, 0.99)


def _slices(*alike: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of some rows after others of tensors of one shape, so that what is made on the way of a step is small."""
    first = alike[0]
    if first.numel() <= _SLICE:
        return iter([alike])
    rows = max(1, _SLICE * len(first) // first.numel())
    return zip(*(each.split(rows) for each in alike), strict=True)
