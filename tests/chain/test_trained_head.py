"""A trained head's loss and gradients, rows cut over devices, against autograd over the whole table."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.chain.comm import Comm
from potluck.chain.heads import head_loss, head_loss_alone
from potluck.chain.loss import Targets
from potluck.chain.ranges import Ranges, split_by
from potluck.chain.trained_embedding import Table, TrainedEmbedding
from potluck.chain.trained_head import TrainedHead
from worlds import run_world

V, D, STEP_TARGETS = 23, 6, 7


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def forbidden(ids: list[int]) -> Tensor:
    raise AssertionError(f"rows {ids} were looked up on the disk, where they are stale")


def expected(W_VD: Tensor, h_ND: Tensor, targets_N: Tensor, softcap: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and its gradients by the rows and by the hidden states, of torch alone."""
    W_VD, h_ND = W_VD.clone().requires_grad_(), h_ND.clone().requires_grad_()
    logits_NV = h_ND @ W_VD.T
    if softcap is not None:
        logits_NV = torch.tanh(logits_NV / softcap) * softcap
    loss = F.cross_entropy(logits_NV, targets_N, reduction="sum") / STEP_TARGETS
    loss.backward()
    assert W_VD.grad is not None
    assert h_ND.grad is not None
    return loss.detach(), W_VD.grad, h_ND.grad


@pytest.mark.parametrize("chunk_bytes", [1, 200, 16 << 20])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("rows", [[23], [22, 1], [9, 0, 14], [0, 3, 0, 20]], ids=str)
def test_it_is_cross_entropy(rows: Sequence[int], softcap: float | None, chunk_bytes: int) -> None:
    W_VD, halves = random(V, D, seed=0), [random(5, D, seed=1), random(3, D, seed=2), random(0, D, seed=3)]
    targets = [torch.tensor(ids, dtype=torch.long) for ids in ([0, 22, 9, 9, 13], [21, 0, 8], [])]
    loss, W_grad_VD, h_grad_ND = expected(W_VD, torch.cat(halves), torch.cat(targets), softcap)

    def body(comm: Comm) -> tuple[Tensor, Tensor, Tensor]:
        held = split_by(rows)[comm.rank]
        table = Table(nn.Parameter(W_VD[list(held)]), held)
        head = TrainedHead(table, softcap, chunk_bytes)
        h_halves = [h_ND[None] for h_ND in halves]
        term, found = head_loss(head, h_halves, Targets(targets, forbidden), STEP_TARGETS, comm)
        return term, table.gradient(), torch.cat([each[0] for each in found])

    terms = run_world(len(rows), body)
    assert float(sum(term for term, _, _ in terms)) == pytest.approx(float(loss), abs=1e-12)
    assert torch.allclose(torch.cat([gradient for _, gradient, _ in terms]), W_grad_VD, atol=1e-12)
    assert all(torch.allclose(found, h_grad_ND, atol=1e-12) for _, _, found in terms)


def test_alone_gradients_add_up_over_micro_batches_and_in_low_precision() -> None:
    W_VD, h_ND, targets_N = random(V, D, seed=0), random(9, D, seed=1), torch.arange(9) * 2
    loss, W_grad_VD, h_grad_ND = expected(W_VD, h_ND, targets_N, None)
    table = Table(nn.Parameter(W_VD.float()), Ranges.of(0, V))
    for _ in range(2):
        found, gradient_ND = head_loss_alone(TrainedHead(table), h_ND.bfloat16(), targets_N, STEP_TARGETS)
    assert float(found) == pytest.approx(float(loss), rel=0.02)
    assert table.gradient().dtype == torch.float32
    assert torch.allclose(table.gradient().double() / 2, W_grad_VD, atol=0.03)
    assert gradient_ND.dtype == torch.bfloat16
    assert torch.allclose(gradient_ND.double(), h_grad_ND, atol=0.03)


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize("spans", [((0, 23),), ((2, 5), (9, 20)), ()], ids=str)
def test_rows_are_looked_up_and_learn_as_in_torch(spans: tuple[tuple[int, int], ...], padding: int | None) -> None:
    W_VD, P_PD, held = random(V, D, seed=0), random(12, D, seed=1), Ranges(spans)
    ids_BS = torch.tensor([[0, 4, 9, 9, 4], [22, 3, 3, 4, 19]])
    plain = nn.Embedding(V, D, padding_idx=padding).double()
    with torch.no_grad():
        plain.weight.copy_(W_VD)
        plain.weight[[row for row in range(V) if row not in held]] = 0
    positions = Table(nn.Parameter(P_PD.clone()), Ranges.of(0, 12))
    table = Table(nn.Parameter(W_VD[list(held)]), held)
    embedding = TrainedEmbedding(table, 3.0, positions, position_offset=2, padding=padding)
    x_BSD = plain(ids_BS) * 3.0
    assert torch.allclose(embedding(ids_BS, torch.float64), x_BSD + P_PD[2:7], atol=1e-12)
    g_BSD = random(2, 5, D, seed=2)
    x_BSD.backward(g_BSD)
    embedding.add_gradient(g_BSD, ids_BS)
    assert plain.weight.grad is not None
    assert torch.allclose(table.gradient(), plain.weight.grad[list(held)], atol=1e-12)
    assert torch.allclose(positions.gradient()[2:7], g_BSD.sum(0), atol=1e-12)
    assert not positions.gradient()[[0, 1, 7, 11]].any()
