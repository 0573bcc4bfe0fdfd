"""The MLP over any subset of its columns, with a gate or without."""

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
        gated_BSF: Tensor = _Gated.apply(self.gate_up(h_BSD, at), self.activation)  # type: ignore[no-untyped-call]
        return self.down(gated_BSF, at)


@dataclass(frozen=True)
class Mlp:
    """A sharded piece: ``down(act(up(h)))`` for this device's columns."""

    up: CutLinears
    down: CutLinears
    activation: Callable[[Tensor], Tensor]

    def __call__(self, h_BSD: Tensor, at: At) -> Tensor:
        """``[B, S, D]``: the partial sum of these columns' outputs."""
        return self.down(self.activation(self.up(h_BSD, at)), at)


class _Gated(torch.autograd.Function):
    """``act(gate) * up`` of the two side by side; keeps them alone and computes the activation again."""

    @staticmethod
    def forward(ctx: Any, gate_up_BS2F: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate_up_BS2F)
        ctx.activation = activation
        gate, up = gate_up_BS2F.chunk(2, -1)
        return activation(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gate_up_BS2F,) = ctx.saved_tensors
        gate, up = gate_up_BS2F.chunk(2, -1)
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            activated = ctx.activation(leaf)
        found = torch.empty_like(gate_up_BS2F)
        dgate, dup = found.chunk(2, -1)
        torch.mul(gradients[0], activated.detach(), out=dup)
        dgate.copy_(torch.autograd.grad(activated, leaf, gradients[0] * up)[0])
        return found, None
