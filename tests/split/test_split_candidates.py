"""The loss ``target`` is cross-entropy where nothing is left out; elsewhere it is off by a term that is known."""

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.loss import Head, Targets, cross_entropy
from potluck.split.candidates import Candidates, candidates
from potluck.split.dataset import Tables
from potluck.split.records import draw_negatives

V, D, N = 53, 12, 9
SOFTCAPS = pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "soft-cap"])


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


TABLE_VD = drawn(V, D, seed=0) * 0.8
H_ND = drawn(N, D, seed=1)
NONE = torch.zeros(0, D, dtype=torch.float64)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def dense(h_ND: Tensor, rows_VD: Tensor, targets_N: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy over these rows by torch, and its gradient."""
    h = h_ND.detach().requires_grad_()
    loss = F.cross_entropy(capped(h @ rows_VD.T, softcap), targets_N, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, h)
    return loss.detach(), gradient


def target_loss(
    joined: Candidates, places_N: Tensor, softcap: float | None, h_ND: Tensor = H_ND
) -> tuple[Tensor, Tensor]:
    head = joined.head(torch.float64, softcap)
    loss, (gradient,) = cross_entropy(head, [h_ND[None]], Targets([places_N], lambda i: head.W_VD[i]), 1, Comm())
    return loss, gradient[0]


def tables(*clients: tuple[Sequence[int], Sequence[int]]) -> list[Tables]:
    """Target ids and negative ids of each contribution."""
    return [Tables(TABLE_VD[list(targets)], TABLE_VD[list(negatives)]) for targets, negatives in clients]


def ids_of(rows_KD: Tensor) -> list[int]:
    return [int((row == TABLE_VD).all(1).nonzero()) for row in rows_KD]


def shuffled(*ids: int, seed: int) -> list[int]:
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    return [ids[i] for i in order]


@SOFTCAPS
@pytest.mark.parametrize("negatives", [0, 20, V - 1], ids=["all in C", "in C and N", "one in C"])
def test_with_the_whole_table_it_is_cross_entropy(softcap: float | None, negatives: int) -> None:
    everything = shuffled(*range(V), seed=2)
    seen, unseen = everything[negatives:], everything[:negatives]
    first, second = seen[: len(seen) // 2 + 1], seen[len(seen) // 3 :]  # a third of them twice
    joined = candidates(tables((first, unseen), (second, seen[:5] + unseen[:3])), V)
    assert (joined.targets, joined.negatives) == (len(seen), len(unseen))
    indices_N = torch.arange(N) % len(second)
    loss, gradient = target_loss(joined, joined.places[1][indices_N], softcap)
    expected = dense(H_ND, TABLE_VD, torch.tensor([second[i] for i in indices_N]), softcap)
    torch.testing.assert_close(loss, expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-12, atol=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.sets(st.integers(0, V - 1), min_size=1), min_size=1, max_size=3),
    st.sampled_from([None, 3.0]),
    st.integers(0, 1 << 30),
)
def test_without_negatives_it_lacks_minus_log_of_the_mass_on_c(
    clients: list[set[int]], softcap: float | None, seed: int
) -> None:
    """``CE - LA = -log(mass on C)``, so that training on LA alone would let mass leave C unseen."""
    h_ND = drawn(N, D, seed=seed)
    own = [shuffled(*client, seed=seed) for client in clients]
    joined = candidates(tables(*((ids, []) for ids in own)), V)
    union = sorted(set().union(*clients))
    assert sorted(ids_of(joined.rows_CD)) == union
    indices_N = torch.arange(N) % len(own[-1])
    targets_N = torch.tensor([own[-1][i] for i in indices_N])
    mass_N = capped(h_ND @ TABLE_VD.T, softcap).softmax(-1)[:, union].sum(-1)
    exact, _ = dense(h_ND, TABLE_VD, targets_N, softcap)
    loss, _ = target_loss(joined, joined.places[-1][indices_N], softcap, h_ND)
    torch.testing.assert_close(exact - loss, -mass_N.log().sum(), rtol=1e-10, atol=1e-10)


@SOFTCAPS
def test_each_negative_stands_for_its_part_of_the_unseen_rows(softcap: float | None) -> None:
    seen, negatives = [4, 9, 1], [30, 31, 32, 33, 34]
    joined = candidates(tables((seen, negatives)), V)
    targets_N = torch.tensor([seen[i % 3] for i in range(N)])
    h = H_ND.clone().requires_grad_()
    l_NV = capped(h @ TABLE_VD.T, softcap)
    weight = (V - len(seen)) / len(negatives)
    Z_N = l_NV[:, seen].exp().sum(-1) + weight * l_NV[:, negatives].exp().sum(-1)
    expected = (Z_N.log() - l_NV[torch.arange(N), targets_N]).sum()
    (expected_gradient,) = torch.autograd.grad(expected, h)
    loss, gradient = target_loss(joined, joined.places[0][torch.arange(N) % 3], softcap)
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-12)


@SOFTCAPS
def test_drawn_negatives_estimate_z_without_bias(softcap: float | None) -> None:
    """Two clients draw independently; the ids they share and those of C are dropped, and the mean of Z stays true."""
    seen, draws = list(range(0, V, 4)), 500
    Z_N = capped(H_ND @ TABLE_VD.T, softcap).exp().sum(-1)
    estimates = []
    for seed in range(draws):
        own = [draw_negatives(V, 8, 2 * seed + client) for client in range(2)]
        joined = candidates(tables((seen, own[0]), ([], own[1])), V)
        m_N, s_N, _ = joined.head(torch.float64, softcap).partial(H_ND)
        estimates.append(m_N.exp() * s_N)
    found = torch.stack(estimates)
    deviations = (found.mean(0) - Z_N) / (found.std(0) / math.sqrt(draws))
    assert deviations.abs().max() < 4
    # and the test can tell: a shift of V instead of V - |C| rows would be seen
    outside_N = Z_N - capped(H_ND @ TABLE_VD[seen].T, softcap).exp().sum(-1)
    wrong = (found.mean(0) + outside_N * len(seen) / (V - len(seen)) - Z_N) / (found.std(0) / math.sqrt(draws))
    assert wrong.abs().mean() > 8


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, V - 1), unique=True), st.lists(st.integers(0, V - 1), unique=True)),
        min_size=1,
        max_size=4,
    )
)
def test_each_row_is_there_once_and_found_again(clients: list[tuple[list[int], list[int]]]) -> None:
    joined = candidates(tables(*clients), V)
    seen = {i for targets, _ in clients for i in targets}
    drawn_ids = {i for _, negatives in clients for i in negatives}
    assert joined.targets == len(seen)
    assert joined.negatives == len(drawn_ids - seen)
    if len(joined.rows_CD) == 0:
        return
    assert set(ids_of(joined.rows_CD[: joined.targets])) == seen
    assert set(ids_of(joined.rows_CD[joined.targets :])) == drawn_ids - seen
    for (targets, _), places in zip(clients, joined.places, strict=True):
        assert torch.equal(joined.rows_CD[places], TABLE_VD[targets])


def test_rows_are_equal_by_all_their_bytes() -> None:
    row = TABLE_VD[0].float()
    close = row.clone()
    close[-1] = torch.nextafter(close[-1], torch.tensor(9.0))
    joined = candidates([Tables(torch.stack([row, close]), NONE.float()), Tables(row[None], close[None])], V)
    assert (joined.targets, joined.negatives) == (2, 0)
    assert [place.tolist() for place in joined.places] == [[0, 1], [0]]


@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
def test_the_shift_is_kept_in_full_precision(compute: torch.dtype) -> None:
    joined = candidates(tables(([1, 2], [3, 4, 5])), V)
    head: Head = joined.head(compute, None)
    assert head.W_VD.dtype == compute
    assert head.shift_V is not None
    assert head.shift_V.dtype == torch.float32
    assert head.shift_V.tolist() == pytest.approx([0, 0] + [math.log((V - 2) / 3)] * 3)
