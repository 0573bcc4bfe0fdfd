"""Gradients come home whole, in chunks of any size, and nobody else keeps them."""

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.trained import Trained
from potluck.pool.gradients import hold, squared_norm
from potluck.pool.reduce import reduce_to_homes
from worlds import run_world


def drawn(shape: Sequence[int], *key: int) -> Tensor:
    seed = sum((n + 1) * 1000**i for i, n in enumerate(key))
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(shapes: Sequence[Sequence[int]]) -> list[Trained]:
    return [
        Trained(f"w{i}", torch.zeros(*shape, requires_grad=True), tuple(shape), None, (), "equal")
        for i, shape in enumerate(shapes)
    ]


@st.composite
def walkers_of_worlds(draw: st.DrawFn) -> tuple[int, tuple[int, ...]]:
    n = draw(st.integers(2, 4))
    return n, draw(st.sampled_from([c for k in range(1, n + 1) for c in combinations(range(n), k)]))


@given(
    walkers_of_worlds(),
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=2), min_size=1, max_size=6),
    st.sampled_from([1, 12, 20, 1 << 20]),
)
@settings(deadline=None, max_examples=30)
def test_homes_have_the_sum_and_others_nothing(
    world: tuple[int, tuple[int, ...]], shapes: list[list[int]], chunk_bytes: int
) -> None:
    n, walkers = world
    sums = [torch.stack([drawn(shape, i, rank) for rank in walkers]).double().sum(0) for i, shape in enumerate(shapes)]
    numbers = sum(s.numel() for s in sums)

    def body(comm: Comm) -> tuple[float, int, int]:
        trained = tensors_of(shapes)
        if comm.rank in walkers:
            for i, t in enumerate(trained):
                t.local.grad = drawn(shapes[i], i, comm.rank)
        held = hold(trained, comm.rank, n)
        comm.clocks.restart()
        reduce_to_homes(held, walkers, comm, chunk_bytes=chunk_bytes)
        assert comm.clocks.awaited_s == 0
        assert len(comm.clocks.blocked_s) == 1, "one entry on every device, or their times cannot be compared"
        at_home = 0
        for h, whole in zip(held, sums, strict=True):
            gradient = h.trained.local.grad
            assert (gradient is None) == (h.home != comm.rank)
            if gradient is not None:
                at_home += gradient.numel()
                assert torch.allclose(gradient.double(), whole, rtol=1e-5, atol=1e-6)
        return float(squared_norm(held, comm.rank)), comm.clocks.bytes_sent, at_home

    found = run_world(n, body)
    assert sum(square for square, _, _ in found) == pytest.approx(sum(float(s.square().sum()) for s in sums), rel=1e-5)
    for rank, (_, sent, at_home) in enumerate(found):
        assert sent == (4 * (numbers - at_home) if rank in walkers else 0)


def test_sums_are_the_same_in_chunks_of_any_size() -> None:
    shapes = [[7, 3], [5], [40], [2, 2]]

    def summed(chunk_bytes: int) -> list[Tensor]:
        def body(comm: Comm) -> list[Tensor]:
            trained = tensors_of(shapes)
            for i, t in enumerate(trained):
                t.local.grad = drawn(shapes[i], i, comm.rank)
            reduce_to_homes(hold(trained, comm.rank, 3), range(3), comm, chunk_bytes=chunk_bytes)
            return [t.local.grad for t in trained if t.local.grad is not None]

        return [gradient for of_rank in run_world(3, body) for gradient in of_rank]

    whole = summed(1 << 20)
    assert len(whole) == len(shapes)
    for chunk_bytes in (4, 24, 64):
        assert all(torch.equal(one, other) for one, other in zip(whole, summed(chunk_bytes), strict=True))
