"""The owner's embedding: rows of the table by id, read as they are needed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.trained_embedding import TrainedEmbedding

ReadRows = Callable[[list[int]], Tensor]
"""Ids to ``[n, D]`` rows of a table."""


@dataclass(frozen=True)
class Embedding:
    """Frozen token embedding; only the device that owns the ids has one."""

    rows: ReadRows
    scale: float
    positions: Callable[[int], Tensor] | None = None
    """Number of positions to ``[S, D]``, added in families that learn positions."""
    types: Callable[[], Tensor] | None = None
    """The table ``[T, D]`` of segments, in families that tell them apart."""

    def __call__(self, ids_BS: Tensor, dtype: torch.dtype, types_BS: Tensor | None = None) -> Tensor:
        """``[B, S, D]`` in the stream's dtype; without ``types_BS`` all tokens are in the first segment."""
        unique, index_BS = ids_BS.unique(return_inverse=True)
        rows_UD = self.rows(unique.tolist()).to(dtype)
        x_BSD = (rows_UD if self.scale == 1.0 else rows_UD * self.scale)[index_BS]
        if self.positions is not None:
            x_BSD = x_BSD + self.positions(ids_BS.shape[1]).to(dtype)
        if self.types is not None:
            table_TD = self.types().to(dtype)
            x_BSD = x_BSD + (table_TD[0] if types_BS is None else table_TD[types_BS])
        return x_BSD


AnyEmbedding: TypeAlias = Embedding | TrainedEmbedding


def share_embedding(
    embedding: AnyEmbedding | None,
    ids_BS: Tensor | None,
    shape_BSD: tuple[int, int, int],
    stream: torch.dtype,
    comm: Comm,
    owner: int = 0,
    types_BS: Tensor | None = None,
) -> Tensor:
    """The first residual stream ``[B, S, D]`` on every device; ids are needed only where ``embedding`` is.

    It travels from rank ``owner`` in the wire's dtype; the owner goes on with what it sent, so that all streams are
    equal. Where all devices look up rows of one table together, they sum what they have.
    """
    if isinstance(embedding, TrainedEmbedding) and embedding.summed:
        assert ids_BS is not None
        return comm.all_reduce(embedding(ids_BS, stream, types_BS)).wait().to(stream)
    travels = stream if comm.group is None or comm.wire is None else comm.wire
    if embedding is not None and ids_BS is not None:
        x_BSD = embedding(ids_BS, stream, types_BS).to(travels)
    else:
        x_BSD = torch.empty(shape_BSD, dtype=travels)
    return comm.broadcast(x_BSD, owner).wait().to(stream)
