"""The gated MLP over any subset of its columns."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from potluck.chain.linear import CutLinears
from potluck.chain.piece import At


@dataclass(frozen=True)
class GatedMlp:
    """A sharded piece: ``down(act(gate(h)) * up(h))`` for this device's columns."""

    gate_up: CutLinears
    down: CutLinears
    activation: Callable[[Tensor], Tensor]

    def __call__(self, h_BSD: Tensor, at: At) -> Tensor:
        """``[B, S, D]``: the partial sum of these columns' outputs."""
        gate_BSF, up_BSF = self.gate_up(h_BSD, at)
        gated_BSF: Tensor = _Gated.apply(gate_BSF, up_BSF, self.activation)  # type: ignore[no-untyped-call]
        (p_BSD,) = self.down(gated_BSF, at)
        return p_BSD


class _Gated(torch.autograd.Function):
    """``act(gate) * up``; keeps the two inputs and computes the activation again in the backward."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return activation(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            activated = ctx.activation(leaf)
        (dgate,) = torch.autograd.grad(activated, leaf, gradients[0] * up)
        return dgate, activated.detach().mul_(gradients[0]), None
