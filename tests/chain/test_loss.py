"""The vocabulary-cut loss with an owner is cross-entropy, exactly."""

import itertools
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.loss import Head, Targets, cross_entropy
from worlds import run_world


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def selected(h_BSD: Tensor, positions: Sequence[int]) -> Tensor:
    """``[1, N, D]``: these of the ``B * S`` positions."""
    return h_BSD.flatten(0, 1)[list(positions)][None]


def check(
    rows: Sequence[int],
    halves: Sequence[tuple[int, int, list[int]]],
    *,
    D: int,
    softcap: float | None,
    spread: float = 2.0,
    chunk_bytes: int = 16 << 20,
    step_targets: int = 7,
    seed: int = 0,
) -> None:
    """Compare with torch; ``rows`` a rank, and for each half ``B``, ``S`` and its supervised positions."""
    V = sum(rows)
    W_VD = random(V, D, seed=seed) * spread
    starts = [0, *itertools.accumulate(rows)]
    hs = [random(B, S, D, seed=seed + 1 + j) for j, (B, S, _) in enumerate(halves)]
    positions = [chosen for _, _, chosen in halves]
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, V, (len(chosen),), generator=generator) for chosen in positions]

    leaves = [h.clone().requires_grad_() for h in hs]
    expected = torch.zeros((), dtype=torch.float64)
    for h, chosen, y in zip(leaves, positions, ids, strict=True):
        logits = h.flatten(0, 1)[chosen] @ W_VD.T
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        expected = expected + F.cross_entropy(logits, y, reduction="sum") / step_targets
    expected.backward()

    def body(comm: Comm) -> tuple[Tensor, list[Tensor]]:
        head = Head(W_VD[starts[comm.rank] : starts[comm.rank + 1]], softcap, chunk_bytes)
        targets = Targets(ids, lambda wanted: W_VD[wanted]) if comm.rank == 0 else None
        return cross_entropy(
            head, [selected(h, n) for h, n in zip(hs, positions, strict=True)], targets, step_targets, comm
        )

    for rank, (loss, gradients) in enumerate(run_world(len(rows), body)):
        assert abs(float(loss) - (float(expected.detach()) if rank == 0 else 0.0)) < 1e-10
        for gradient, leaf, chosen in zip(gradients, leaves, positions, strict=True):
            reference = selected(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad, chosen)
            assert gradient.shape == reference.shape == (1, len(chosen), D)
            assert torch.allclose(gradient, reference, rtol=1e-10, atol=1e-10)


@st.composite
def half(draw: st.DrawFn) -> tuple[int, int, list[int]]:
    B, S = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    return B, S, sorted(draw(st.sets(st.integers(0, B * S - 1))))


@given(
    rows=st.lists(st.integers(0, 6), min_size=1, max_size=3).filter(lambda counts: sum(counts) > 0),
    halves=st.lists(half(), min_size=1, max_size=2),
    D=st.integers(1, 5),
    softcap=st.none() | st.floats(0.5, 30.0),
    chunk_bytes=st.sampled_from([1, 100, 16 << 20]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=50)
def test_any_cut_is_cross_entropy(
    rows: list[int],
    halves: list[tuple[int, int, list[int]]],
    D: int,
    softcap: float | None,
    chunk_bytes: int,
    seed: int,
) -> None:
    check(rows, halves, D=D, softcap=softcap, chunk_bytes=chunk_bytes, seed=seed)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rows", [[0, 5, 4], [9, 0, 0], [4, 0, 5]], ids=str)
def test_devices_without_rows_and_halves_without_targets(rows: list[int], softcap: float | None) -> None:
    check(rows, [(2, 3, [0, 4, 5]), (1, 2, [])], D=4, softcap=softcap)
    check(rows, [(2, 3, []), (1, 2, [1])], D=4, softcap=softcap)
    check(rows, [(2, 3, []), (1, 2, [])], D=4, softcap=softcap)


def test_logits_far_apart_neither_overflow_nor_vanish() -> None:
    check([3, 4], [(1, 3, [0, 1, 2])], D=4, softcap=None, spread=2000.0)


def test_alone_it_needs_no_messages() -> None:
    W_VD, h_BSD = random(7, 4, seed=0), random(1, 3, 4, seed=1)
    ids_N = torch.tensor([2, 6])
    targets = Targets([ids_N], lambda wanted: W_VD[wanted])
    loss, (gradient,) = cross_entropy(Head(W_VD), [selected(h_BSD, [0, 2])], targets, 2, Comm())
    leaf = h_BSD.clone().requires_grad_()
    expected = F.cross_entropy(leaf[0, [0, 2]] @ W_VD.T, ids_N)
    expected.backward()
    assert leaf.grad is not None
    assert torch.allclose(loss, expected.detach(), atol=1e-12)
    assert torch.allclose(gradient, selected(leaf.grad, [0, 2]), atol=1e-12)


def test_a_sure_answer_in_bfloat16_costs_nothing_and_pulls_nowhere() -> None:
    """Unequal rounding of the same logit or row, in log Z and at the owner, would leave a loss below zero."""
    V, D = 200, 256
    W_VD = (random(V, D, seed=0) * 0.2).bfloat16()
    ids_N = torch.arange(V)
    h_1ND = (4 * W_VD[ids_N])[None]
    targets = Targets([ids_N], lambda wanted: W_VD[wanted])
    loss, (gradient,) = cross_entropy(Head(W_VD), [h_1ND], targets, V, Comm())
    assert float((h_1ND[0] * W_VD[ids_N]).sum(-1).min()) > 20
    assert abs(float(loss)) < 1e-3
    assert gradient.abs().max() < 1e-6
