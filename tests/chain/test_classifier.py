"""The head of whole sequences: loss and gradients by plain autograd, and zeros where nothing is owned."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.chain.classifier import Classifier, Kind, classify, values_of
from potluck.chain.comm import Comm
from potluck.chain.heads import head_loss_alone
from potluck.chain.loss import Targets
from worlds import run_world

D, C = 6, 3


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(kind: Kind, *, hidden: bool, trained: bool = True) -> Classifier:
    size = C if kind == "classes" else 1
    tensors = [random(size, D, seed=1), random(size, seed=2), random(D, D, seed=3), random(D, seed=4)]
    w, b, v, c = (tensor.requires_grad_(trained) for tensor in tensors)
    return Classifier(kind, (w, b), (v, c) if hidden else None)


def targets_of(kind: Kind, n: int, seed: int) -> Tensor:
    if kind == "classes":
        return torch.randint(C, (n,), generator=torch.Generator().manual_seed(seed))
    return random(n, seed=seed).view(torch.int64)


def by_the_book(of: Classifier, h_ND: Tensor, targets_N: Tensor) -> Tensor:
    if of.hidden is not None:
        h_ND = torch.tanh(h_ND @ of.hidden[0].T + of.hidden[1])
    weight, bias = of.out
    logits_NC = h_ND @ weight.T + (0 if bias is None else bias)
    if of.kind == "classes":
        return -logits_NC.log_softmax(-1)[range(len(targets_N)), targets_N].sum()
    return ((logits_NC[:, 0] - values_of(targets_N)) ** 2).sum()


@pytest.mark.parametrize("hidden", [True, False], ids=["two layers", "one"])
@pytest.mark.parametrize("kind", ["classes", "value"])
def test_two_halves_on_three_devices_are_one_batch(kind: Kind, hidden: bool) -> None:
    h_halves = [random(1, n, D, seed=n) for n in (4, 2)]
    targets = [targets_of(kind, n, 10 + n) for n in (4, 2)]
    reference = head(kind, hidden=hidden)
    leaves = [h[0].clone().requires_grad_() for h in h_halves]
    expected = sum((by_the_book(reference, h, t) for h, t in zip(leaves, targets, strict=True)), torch.zeros(())) / 9
    expected.backward()

    def body(comm: Comm) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        own = head(kind, hidden=hidden)
        labels = Targets(targets, lambda ids: torch.empty(0)) if comm.rank == 1 else None
        loss, gradients = classify(own, h_halves, labels, 9, comm)
        tensors = [tensor for pair in (own.out, own.hidden or ()) for tensor in pair if tensor is not None]
        return loss, gradients, [tensor.grad for tensor in tensors]

    wanted = [tensor for pair in (reference.out, reference.hidden or ()) for tensor in pair if tensor is not None]
    for rank, (loss, gradients, of_head) in enumerate(run_world(3, body)):
        assert abs(float(loss) - (expected.item() if rank == 1 else 0.0)) < 1e-12
        for gradient, leaf in zip(gradients, leaves, strict=True):
            assert leaf.grad is not None
            assert (gradient[0] - leaf.grad).abs().max() < 1e-12
        for gradient, tensor in zip(of_head, wanted, strict=True):
            assert tensor.grad is not None
            assert (gradient is None) if rank != 1 else bool((gradient - tensor.grad).abs().max() < 1e-12)


def test_a_frozen_head_passes_the_gradient_on() -> None:
    frozen, h_ND, targets_N = (
        head("classes", hidden=True, trained=False),
        random(4, D, seed=1),
        targets_of("classes", 4, 2),
    )
    leaf = h_ND.clone().requires_grad_()
    by_the_book(frozen, leaf, targets_N).backward()
    loss, gradient_ND = head_loss_alone(frozen, h_ND, targets_N, 1)
    assert leaf.grad is not None
    assert (gradient_ND - leaf.grad).abs().max() < 1e-12
    assert not loss.requires_grad


def test_bfloat16_states_are_compared_in_float32() -> None:
    own = head("classes", hidden=False)
    h_ND, targets_N = random(4, D, seed=1).bfloat16(), targets_of("classes", 4, 2)
    loss, gradient_ND = head_loss_alone(own, h_ND, targets_N, 4)
    assert (loss.dtype, gradient_ND.dtype) == (torch.float32, torch.bfloat16)
    weight, bias = own.out
    assert bias is not None
    expected = F.cross_entropy(h_ND.float() @ weight.float().T + bias.float(), targets_N)
    assert abs(loss.item() - expected.item()) < 1e-6
