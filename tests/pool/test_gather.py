import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from pool.held_ranges import Plan, plans, trained
from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges
from potluck.pool.gather import gather_named, gather_whole
from worlds import run_world


@given(plans())
@example((2, [((5, 2), 0, (Ranges(((0, 1), (2, 4))), Ranges(((1, 2), (4, 5)))), "cut")]))
@example((3, [((2, 4), 1, (Ranges(((1, 2), (3, 4))), Ranges(()), Ranges(((0, 1), (2, 4)))), "partial")]))
@settings(deadline=None, max_examples=25)
def test_the_whole_is_what_was_cut(plan: Plan) -> None:
    world_size, tensors = plan
    generator = torch.Generator().manual_seed(0)
    wholes = [torch.randn(shape, generator=generator) for shape, *_ in tensors]

    def body(comm: Comm) -> dict[str, Tensor]:
        held = [
            trained(whole, dim, held, gradient, comm.rank, name=f"w{i}")
            for i, (whole, (_, dim, held, gradient)) in enumerate(zip(wholes, tensors, strict=True))
        ]
        return dict(gather_whole(held, comm))

    gathered, *others = run_world(world_size, body)
    assert list(gathered) == [f"w{i}" for i in range(len(wholes))]
    assert all(torch.equal(gathered[f"w{i}"], whole) for i, whole in enumerate(wholes))
    assert not any(tensor.requires_grad for tensor in gathered.values())
    assert all(other == {} for other in others)


@given(
    st.permutations(range(3)),
    st.lists(st.lists(st.lists(st.integers(0, 3), max_size=2), max_size=3), min_size=3, max_size=3),
    st.sampled_from([torch.float32, torch.float64]),
)
@settings(deadline=None, max_examples=25)
def test_what_only_its_holder_knows_of_comes_by_name(
    order: list[int], shapes: list[list[list[int]]], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    held = [
        [(f"größe.{rank}.{i}", torch.randn(shape, generator=generator, dtype=dtype)) for i, shape in enumerate(of_rank)]
        for rank, of_rank in enumerate(shapes)
    ]
    gathered, *others = run_world(3, lambda comm: [*gather_named(held[comm.rank], comm, order)])
    expected = [each for rank in order for each in held[rank]]
    assert [name for name, _ in gathered] == [name for name, _ in expected]
    for (_, found), (_, whole) in zip(gathered, expected, strict=True):
        assert found.dtype == dtype
        assert torch.equal(found, whole)
    assert others == [[], []]
