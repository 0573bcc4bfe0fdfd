"""Tables that are trained: rows are looked up in memory, and their gradients follow from the first stream's.

The stream is a sum over tables, ``x = scale * tokens[id] + positions[p] + types[t]``, and may be one over devices: each
looks up what it holds and has zeros elsewhere. So with the gradient ``g`` of ``x``, which every device has, a row's
gradient is the sum of ``g`` over the positions that read it, times ``scale`` for tokens, and needs no message.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.ranges import Ranges


@dataclass(frozen=True)
class Table:
    """This device's rows of a trained table."""

    W_VD: Tensor
    """A leaf, float32 or better."""
    held: Ranges
    """Which rows of the whole table these are."""

    def find(self, ids_N: Tensor) -> tuple[Tensor, Tensor]:
        """Where in ``ids_N`` rows are asked for that are here, and these rows' places in ``W_VD``."""
        wanted, places = [ids_N.new_empty(0)], [ids_N.new_empty(0)]
        first = 0
        for start, stop in self.held.spans:
            here_M = ((ids_N >= start) & (ids_N < stop)).nonzero()[:, 0]
            wanted.append(here_M)
            places.append(ids_N[here_M] - start + first)
            first += stop - start
        return torch.cat(wanted), torch.cat(places)

    def look_up(self, ids_N: Tensor, dtype: torch.dtype) -> Tensor:
        """``[N, D]``, zeros where a row is not here."""
        wanted_M, places_M = self.find(ids_N)
        rows_ND = torch.zeros(len(ids_N), self.W_VD.shape[1], dtype=dtype)
        return rows_ND.index_copy_(0, wanted_M, self.W_VD.detach()[places_M].to(dtype))

    def gradient(self) -> Tensor:
        """What has been found of the gradient so far, in place; zeros at first."""
        if self.W_VD.grad is None:
            self.W_VD.grad = torch.zeros_like(self.W_VD)
        return self.W_VD.grad

    def add_gradient(self, ids_N: Tensor, g_ND: Tensor) -> None:
        """Add the gradients of looked-up rows to those of the rows that are here."""
        wanted_M, places_M = self.find(ids_N)
        gradient_VD = self.gradient()
        gradient_VD.index_add_(0, places_M, g_ND[wanted_M].to(gradient_VD.dtype))


@dataclass(frozen=True)
class TrainedEmbedding:
    """This device's part of the tables that the first stream is made of; may be empty."""

    tokens: Table
    scale: float
    positions: Table | None = None
    """In families that learn positions."""
    types: Table | None = None
    """Of segments, in families that tell them apart."""
    position_offset: int = 0
    """Row of the first position."""
    padding: int | None = None
    """The token whose row learns nothing from being looked up, as in ``torch.nn.Embedding``."""
    summed: bool = False
    """Whether other devices hold other rows, so that all look up together; else who holds them does so alone."""

    def __call__(self, ids_BS: Tensor, dtype: torch.dtype, types_BS: Tensor | None = None) -> Tensor:
        """``[B, S, D]``, this device's term; without ``types_BS`` all tokens are in the first segment."""
        x_BSD = self.tokens.look_up(ids_BS.flatten(), dtype).view(*ids_BS.shape, -1)
        if self.scale != 1.0:
            x_BSD *= self.scale
        if self.positions is not None:
            x_BSD += self.positions.look_up(self._positions(ids_BS), dtype)
        if self.types is not None:
            x_BSD += self.types.look_up(_types(ids_BS, types_BS), dtype).view_as(x_BSD)
        return x_BSD

    def add_gradient(self, x_grad_BSD: Tensor, ids_BS: Tensor, types_BS: Tensor | None = None) -> None:
        """Add to ``.grad`` of the tables' rows what follows from the gradient of the whole stream."""
        g_MD, ids_M = x_grad_BSD.flatten(0, 1), ids_BS.flatten()
        learning_M = slice(None) if self.padding is None else ids_M != self.padding
        tokens_MD = g_MD[learning_M]
        self.tokens.add_gradient(ids_M[learning_M], tokens_MD if self.scale == 1.0 else tokens_MD * self.scale)
        if self.positions is not None:
            self.positions.add_gradient(self._positions(ids_BS), x_grad_BSD.sum(0))
        if self.types is not None:
            self.types.add_gradient(_types(ids_BS, types_BS), g_MD)

    def _positions(self, ids_BS: Tensor) -> Tensor:
        return self.position_offset + torch.arange(ids_BS.shape[1])


def _types(ids_BS: Tensor, types_BS: Tensor | None) -> Tensor:
    return torch.zeros_like(ids_BS.flatten()) if types_BS is None else types_BS.flatten()
