"""The head of a whole sequence: classes or a value from the hidden state of one position of each row.

It is small, so every device has it whole, but only the owner, who has the labels, computes with it. There it gets its
gradients, by autograd in float32 or better, and the gradient of the hidden states, which the owner sends: others add
zeros in the same sum. The head's tensors are trained with a *partial* gradient: who owns nothing has none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.loss import Targets

Kind = Literal["classes", "value"]


@dataclass(frozen=True)
class Classifier:
    """``out(h)``, or ``out(tanh(hidden(h)))`` in families with a layer between."""

    kind: Kind
    """Whether outputs are logits of classes, or the one output is the value itself."""
    out: tuple[Tensor, Tensor | None]
    """Weight ``[C, D]`` and bias ``[C]``; ``C`` is 1 for a value."""
    hidden: tuple[Tensor, Tensor] | None = None
    """Weight ``[D, D]`` and bias ``[D]``."""

    def logits(self, h_ND: Tensor) -> Tensor:
        """``[N, C]`` in float32, or float64 if ``h`` is."""
        x_ND = h_ND.to(torch.promote_types(h_ND.dtype, torch.float32))
        if self.hidden is not None:
            x_ND = torch.tanh(_linear(x_ND, *self.hidden))
        return _linear(x_ND, *self.out)

    def loss(self, h_ND: Tensor, targets_N: Tensor) -> Tensor:
        """Sum over rows of the cross-entropy, or of the squared distance from the value, in the dtype of the logits.

        Args:
            h_ND: hidden states.
            targets_N: int64: classes, or the bits of values in float64.
        """
        logits_NC = self.logits(h_ND)
        if self.kind == "classes":
            return F.cross_entropy(logits_NC, targets_N, reduction="sum")
        return (logits_NC[:, 0] - values_of(targets_N).to(logits_NC.dtype)).square().sum()


def classify(
    head: Classifier,
    h_halves: Sequence[Tensor],
    targets: Targets | None,
    step_targets: int,
    comm: Comm,
) -> tuple[Tensor, list[Tensor]]:
    """As :func:`potluck.chain.loss.cross_entropy`; the owner's head tensors get their gradients on the way.

    Args:
        head: the same on all devices.
        h_halves: ``[1, N, D]`` normed last hidden states of each half's read positions, equal on all devices.
        targets: the owner's labels; None on every other device.
        step_targets: rows of the step, over all micro-batches and devices.
        comm: the messages.

    Returns:
        The owner's loss (0 elsewhere), and the gradient of each half's hidden states, equal on all devices; both
        divided by ``step_targets``.
    """
    loss = torch.zeros((), dtype=torch.promote_types(h_halves[0].dtype, torch.float32))
    messages = []
    for j, h_1ND in enumerate(h_halves):
        leaf_ND = h_1ND[0].detach().to(loss.dtype)
        gradient_ND = torch.zeros_like(leaf_ND)
        if targets is not None:
            with torch.enable_grad():
                leaf_ND.requires_grad_()
                part = head.loss(leaf_ND, targets.ids_halves[j]) / step_targets
            part.backward()
            loss = loss + part.detach()
            if leaf_ND.grad is not None:
                gradient_ND = leaf_ND.grad
        messages.append(comm.all_reduce(gradient_ND))
    gradients = [message.wait().to(h.dtype)[None] for h, message in zip(h_halves, messages, strict=True)]
    return loss, gradients


def values_of(targets_N: Tensor) -> Tensor:
    """Float64 values from their bits as int64, in which they are kept and sent as token ids are."""
    return targets_N.view(torch.float64)


def _linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return F.linear(x, weight_OI.to(x.dtype), None if bias_O is None else bias_O.to(x.dtype))
