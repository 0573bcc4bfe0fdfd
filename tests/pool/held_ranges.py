"""Random ways to hold tensors on several ranks."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from potluck.chain.ranges import Ranges
from potluck.chain.trained import Gradient, Trained

Tensors = list[tuple[tuple[int, ...], int | None, tuple[Ranges, ...], Gradient]]
"""Each by shape, cut dimension, holders and kind of gradient."""
Plan = tuple[int, Tensors]
"""World size and tensors."""


@st.composite
def covers(draw: st.DrawFn, world_size: int, size: int) -> tuple[Ranges, ...]:
    """Which rank holds which of ``size`` indices: each is held by one at least, and several may hold the same."""
    held: list[set[int]] = [draw(st.sets(st.integers(0, size - 1))) for _ in range(world_size)]
    for index in range(size):
        if not any(index in indices for indices in held):
            held[draw(st.integers(0, world_size - 1))].add(index)
    return tuple(Ranges.covering(indices) for indices in held)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    world_size = draw(st.integers(2, 4))
    tensors: Tensors = []
    for _ in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=2)))
        dim = draw(st.sampled_from([None, *range(len(shape))]))
        if dim is None:
            tensors.append((shape, None, (), draw(st.sampled_from(["equal", "partial"]))))
            continue
        held = draw(covers(world_size, shape[dim]))
        overlaps = sum(len(ranges) for ranges in held) > shape[dim]
        tensors.append((shape, dim, held, "partial" if overlaps else "cut"))
    return world_size, tensors


def part_of(whole: Tensor, dim: int | None, held: tuple[Ranges, ...], rank: int) -> Tensor:
    if dim is None:
        return whole.clone()
    return whole.index_select(dim, torch.tensor(list(held[rank]), dtype=torch.long))


def trained(
    whole: Tensor, dim: int | None, held: tuple[Ranges, ...], gradient: Gradient, rank: int, name: str = "w"
) -> Trained:
    local = part_of(whole, dim, held, rank).requires_grad_()
    return Trained(name, local, tuple(whole.shape), dim, held, gradient)
