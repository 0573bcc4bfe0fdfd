"""Sums, norms and values of tensors that several devices hold, against dense computations."""

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from pool.held_ranges import Plan, part_of, plans, trained
from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges
from potluck.chain.trained import Trained
from potluck.pool.gradients import hold, spread_shared, squared_norm, steps_here, sum_partial, unequal
from potluck.pool.reduce import spread_from_homes
from worlds import run_world


def drawn(shape: tuple[int, ...], *key: int) -> Tensor:
    seed = sum((n + 1) * 1000**i for i, n in enumerate(key))
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def built(plan: Plan, rank: int) -> list[Trained]:
    return [
        trained(drawn(shape, i), dim, held, gradient, rank, f"w{i}")
        for i, (shape, dim, held, gradient) in enumerate(plan[1])
    ]


def holders(dim: int | None, held: tuple[Ranges, ...], world_size: int, index: int) -> list[int]:
    return list(range(world_size)) if dim is None else [rank for rank in range(world_size) if index in held[rank]]


def dense_gradient(plan: Plan, i: int) -> Tensor:
    """What one device with everything would have: for partial ones, the sum of what each holder has found."""
    world_size, tensors = plan
    shape, dim, held, gradient = tensors[i]
    if dim is None:
        terms = [drawn(shape, i, rank) for rank in range(world_size)]
        return torch.stack(terms).sum(0) if gradient == "partial" else terms[0]
    whole = torch.zeros(shape, dtype=torch.float64)
    for rank in range(world_size):
        indices = torch.tensor(list(held[rank]), dtype=torch.long)
        whole.index_add_(dim, indices, part_of(drawn(shape, i, rank), dim, held, rank))
    return whole


def set_gradients(plan: Plan, rank: int, mine: list[Trained]) -> None:
    for i, ((shape, dim, held, gradient), t) in enumerate(zip(plan[1], mine, strict=True)):
        found_by = 0 if gradient == "equal" else rank
        t.local.grad = part_of(drawn(shape, i, found_by), dim, held, rank)


@given(plans())
@settings(deadline=None, max_examples=30)
def test_sums_and_norm_are_the_dense_ones(plan: Plan) -> None:
    dense = [dense_gradient(plan, i) for i in range(len(plan[1]))]

    def body(comm: Comm) -> Tensor:
        mine = built(plan, comm.rank)
        set_gradients(plan, comm.rank, mine)
        held = hold(mine, comm.rank, comm.world_size)
        sum_partial(held, comm)
        for t, whole in zip(mine, dense, strict=True):
            assert t.local.grad is not None
            assert torch.allclose(t.local.grad, part_of(whole, t.dim, t.held, comm.rank), rtol=1e-12, atol=1e-12)
        return squared_norm(held, comm.rank)

    terms = run_world(plan[0], body)
    expected = sum(float(whole.pow(2).sum()) for whole in dense)
    assert float(torch.stack(terms).sum()) == pytest.approx(expected, rel=1e-10, abs=1e-12)


@given(plans())
@settings(deadline=None, max_examples=30)
def test_every_holder_takes_the_values_of_home_or_of_the_first_holder(plan: Plan) -> None:
    world_size, tensors = plan

    def stepped(i: int, rank: int) -> Tensor:
        return drawn(tensors[i][0], i, rank)

    def body(comm: Comm) -> list[int | None]:
        mine = built(plan, comm.rank)
        for i, t in enumerate(mine):
            t.local.detach().copy_(part_of(stepped(i, comm.rank), t.dim, t.held, comm.rank))
        held = hold(mine, comm.rank, comm.world_size)
        spread_from_homes(held, comm, chunk_bytes=48)
        spread_shared(held, comm)
        for i, h in enumerate(held):
            t = h.trained
            if h.home is not None:
                assert torch.equal(t.local, stepped(i, h.home))
                continue
            assert t.dim is not None
            for place, index in enumerate(t.held[comm.rank]):
                first = holders(t.dim, t.held, world_size, index)[0]
                assert torch.equal(t.local.select(t.dim, place), stepped(i, first).select(t.dim, index))
        assert list(unequal(held, comm)) == []
        return [h.home for h in held]

    homes = run_world(world_size, body)
    assert all(each == homes[0] for each in homes)
    assert [home is not None for home in homes[0]] == [dim is None for _, dim, _, _ in tensors]


def test_homes_are_shared_out_by_size_and_each_is_stepped_once() -> None:
    sizes = [8, 5, 4, 4, 1]
    plan: Plan = (3, [((size,), None, (), "equal") for size in sizes])
    homes = [h.home for h in hold(built(plan, 0), 0, 3)]
    assert homes == [0, 1, 2, 2, 1]
    stepped = []
    for rank in range(3):
        mine = built(plan, rank)
        here = steps_here(hold(mine, rank, 3), rank)
        stepped += [i for i, t in enumerate(mine) if any(t.local is tensor for tensor in here)]
    assert sorted(stepped) == list(range(len(sizes)))


def test_unequal_values_are_found() -> None:
    plan: Plan = (2, [((3,), None, (), "equal"), ((2,), None, (), "partial")])

    def body(comm: Comm) -> list[str]:
        mine = built(plan, comm.rank)
        if comm.rank == 1:
            mine[1].local.detach()[0] += 1e-12
        return list(unequal(hold(mine, comm.rank, 2), comm))

    assert run_world(2, body) == [["w1"], ["w1"]]


def test_alone_nothing_is_exchanged() -> None:
    plan: Plan = (1, [((3,), None, (), "partial"), ((4,), 0, (Ranges.of(0, 4),), "cut")])
    mine = built(plan, 0)
    set_gradients(plan, 0, mine)
    held = hold(mine, 0, 1)
    sum_partial(held, Comm())
    spread_from_homes(held, Comm())
    spread_shared(held, Comm())
    expected = sum(float(dense_gradient(plan, i).pow(2).sum()) for i in range(2))
    assert float(squared_norm(held, 0)) == pytest.approx(expected)
