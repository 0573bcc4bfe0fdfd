"""Loss and gradient of either kind of head: of token ids over a vocabulary, or of whole sequences."""

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from potluck.chain.classifier import Classifier, classify
from potluck.chain.comm import Comm
from potluck.chain.loss import Head, Targets, cross_entropy, loss_alone
from potluck.chain.trained_head import TrainedHead, trained_cross_entropy

AnyHead: TypeAlias = Head | TrainedHead | Classifier


def head_loss(
    head: AnyHead, h_halves: Sequence[Tensor], targets: Targets | None, step_targets: int, comm: Comm
) -> tuple[Tensor, list[Tensor]]:
    """See :func:`potluck.chain.loss.cross_entropy` and :func:`potluck.chain.classifier.classify`.

    A trained head over the vocabulary has ``targets`` on all devices.
    """
    if isinstance(head, TrainedHead):
        assert targets is not None
        return trained_cross_entropy(head, h_halves, targets, step_targets, comm)
    if isinstance(head, Classifier):
        return classify(head, h_halves, targets, step_targets, comm)
    return cross_entropy(head, h_halves, targets, step_targets, comm)


def head_loss_alone(head: AnyHead, h_ND: Tensor, targets_N: Tensor, step_targets: int) -> tuple[Tensor, Tensor]:
    """:func:`head_loss` on a device that has the whole head and the labels: the loss, and its gradient ``[N, D]``.

    Args:
        head: all of it.
        h_ND: normed last hidden states of supervised positions.
        targets_N: their targets.
        step_targets: by which both are divided.
    """
    if isinstance(head, Head):
        return loss_alone(head, h_ND, targets_N, step_targets)
    loss, (gradient_1ND,) = head_loss(head, [h_ND[None]], labels_alone(targets_N), step_targets, Comm())
    return loss, gradient_1ND[0]


def labels_alone(targets_N: Tensor) -> Targets:
    """Labels as targets of a head that reads no row from elsewhere."""
    return Targets([targets_N], _no_rows)


def _no_rows(ids: list[int]) -> Tensor:
    raise AssertionError("a sequence's label is no token, and a trained head has its rows itself")
