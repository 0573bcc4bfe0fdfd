"""The gated MLP over any subset of its columns."""

from collections.abc import Callable
from dataclasses import dataclass

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
        (p_BSD,) = self.down(self.activation(gate_BSF) * up_BSF, at)
        return p_BSD
