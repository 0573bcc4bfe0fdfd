"""Moments on the disk are those of torch's own optimizer: each goes on bit for bit from what the other has left."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lion_pytorch import Lion

from potluck.chain.trained import Trained
from potluck.job_sections import OptimizerName
from potluck.models.optimizer import optimizer_of
from potluck.split.checkpoint import restore, save_checkpoint

RATE, DECAY = 1e-2, 0.3


def trained() -> list[Trained]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (6, 5), "vector": (7,), "never": (3, 3)}
    values = {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}
    return [Trained(name, t, tuple(t.shape), None, (), "equal") for name, t in values.items()]


def ours(kind: OptimizerName, tensors: list[Trained]) -> tuple[Any, Callable[[], None]]:
    optimizer = optimizer_of([t.local for t in tensors], kind, DECAY)
    assert optimizer is not None
    return optimizer, lambda: optimizer.step(RATE)


def librarys(kind: OptimizerName, tensors: list[Trained]) -> tuple[Any, Callable[[], None]]:
    groups = [{"params": [t.local], "weight_decay": DECAY if t.local.ndim > 1 else 0.0} for t in tensors]
    made = Lion(groups, lr=RATE) if kind == "lion" else torch.optim.AdamW(groups, lr=RATE, fused=True)
    return made, lambda: made.step()


def steps(first: int, last: int, tensors: list[Trained], step: Callable[[], None]) -> None:
    for number in range(first, last):
        generator = torch.Generator().manual_seed(number)
        for t in tensors[:2]:
            t.local.grad = torch.randn(t.local.shape, generator=generator)
        step()


@pytest.mark.parametrize(("before", "after"), [(librarys, ours), (ours, librarys), (ours, ours)])
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_training_goes_on_from_the_file(kind: OptimizerName, before: Any, after: Any, tmp_path: Path) -> None:
    unbroken, broken, resumed = trained(), trained(), trained()
    steps(0, 5, unbroken, librarys(kind, unbroken)[1])
    optimizer, step = before(kind, broken)
    steps(0, 3, broken, step)
    save_checkpoint(tmp_path / "checkpoint", broken, optimizer, {})
    optimizer, step = after(kind, resumed)
    restore(tmp_path / "checkpoint", resumed, optimizer)
    steps(3, 5, resumed, step)
    assert all(torch.equal(a.local, b.local) for a, b in zip(unbroken, resumed, strict=True))
    assert not torch.equal(resumed[0].local, broken[0].local)
    assert set(optimizer.state) == {t.local for t in resumed[:2]}
