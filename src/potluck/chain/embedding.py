"""The owner's embedding: rows of the table by id, read as they are needed."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.comm import Comm

ReadRows = Callable[[list[int]], Tensor]
"""Ids to ``[n, D]`` rows of a table."""


@dataclass(frozen=True)
class Embedding:
    """Frozen token embedding; only the device that owns the ids has one."""

    rows: ReadRows
    scale: float
    positions: Callable[[int], Tensor] | None = None
    """Number of positions to ``[S, D]``, added in families that learn positions."""

    def __call__(self, ids_BS: Tensor, dtype: torch.dtype) -> Tensor:
        """``[B, S, D]`` in the stream's dtype."""
        unique, index_BS = ids_BS.unique(return_inverse=True)
        rows_UD = self.rows(unique.tolist()).to(dtype)
        x_BSD = (rows_UD if self.scale == 1.0 else rows_UD * self.scale)[index_BS]
        return x_BSD if self.positions is None else x_BSD + self.positions(ids_BS.shape[1]).to(dtype)


def share_embedding(
    embedding: Embedding | None,
    ids_BS: Tensor | None,
    shape_BSD: tuple[int, int, int],
    stream: torch.dtype,
    comm: Comm,
    owner: int = 0,
) -> Tensor:
    """The first residual stream ``[B, S, D]`` on every device; ids are needed only where ``embedding`` is.

    It travels from rank ``owner`` in the wire's dtype; the owner goes on with what it sent, so that all streams are
    equal.
    """
    travels = stream if comm.group is None or comm.wire is None else comm.wire
    if embedding is not None and ids_BS is not None:
        x_BSD = embedding(ids_BS, stream).to(travels)
    else:
        x_BSD = torch.empty(shape_BSD, dtype=travels)
    return comm.broadcast(x_BSD, owner).wait().to(stream)
