"""``tensor``: every device walks every link with its share of heads, columns and vocabulary rows.

``single`` is the same walk with the whole share, and no messages.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.embedding import share_embedding
from potluck.chain.heads import head_loss
from potluck.chain.loss import Targets
from potluck.chain.piece import At
from potluck.chain.trained_embedding import TrainedEmbedding
from potluck.chain.trained_head import TrainedHead
from potluck.chain.walk import backward, forward
from potluck.models.build import Part
from potluck.pool.gather import gather_whole
from potluck.pool.gradients import hold, spread_shared
from potluck.pool.halves import deal
from potluck.pool.micro_batch import MicroBatch, told_everyone
from potluck.pool.reduce import spread_from_homes


class TensorParallel:
    """See :class:`potluck.pool.strategies.strategy.Strategy`."""

    def __init__(self, part: Part, comm: Comm, *, half_batches: int, checkpointing: bool, seed: int) -> None:
        """Prepare this device's walks.

        Args:
            part: this rank's share of every link.
            comm: the messages.
            half_batches: 1 or 2 parts of a micro-batch in flight.
            checkpointing: recompute each piece in the backward walk.
            seed: from which masks of dropout follow.
        """
        self.part, self._comm = part, comm
        self.held = hold(part.chain.trained, comm.rank, comm.world_size)
        self._half_batches, self._checkpointing, self._seed = half_batches, checkpointing, seed

    def walk(self, micro_batches: Sequence[MicroBatch], step: int, step_targets: int) -> Tensor:
        """Walk each micro-batch with its halves in flight together."""
        part, comm = self.part, self._comm
        total = torch.zeros((), dtype=torch.float64)
        for m, each in enumerate(micro_batches):
            if isinstance(part.head, TrainedHead):
                each = told_everyone(each, comm)
            halves = deal(each.layout, each.batch, self._half_batches)
            ats = [At(self._seed, step, m, j, lengths_B=half.lengths_B) for j, half in enumerate(halves)]
            D = part.hidden_size
            embedding = None if each.batch is None else part.embedding
            streams = [
                share_embedding(
                    embedding, half.ids_BS, (*half.shape_BS, D), part.stream, comm, each.owner, half.types_BS
                )
                for half in halves
            ]
            supervised = [half.positions_N for half in halves]
            hidden, tapes = forward(part.chain, streams, supervised, ats, comm, checkpointing=self._checkpointing)
            labels = [half.targets_N for half in halves if half.targets_N is not None]
            targets = None if each.batch is None else Targets(labels, part.target_rows)
            loss, gradients = head_loss(part.head, hidden, targets, step_targets, comm)
            x_grads = backward(part.chain, tapes, gradients, comm)
            if isinstance(part.embedding, TrainedEmbedding) and each.batch is not None:
                for half, x_grad_BSD in zip(halves, x_grads, strict=True):
                    assert half.ids_BS is not None
                    part.embedding.add_gradient(x_grad_BSD, half.ids_BS, half.types_BS)
            total += loss.double()
        return total

    def spread(self) -> None:
        """Replicated tensors from their homes, shared rows from their first holders."""
        spread_from_homes(self.held, self._comm)
        spread_shared(self.held, self._comm)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Bring the parts of every trained tensor together by their ranges."""
        return gather_whole(self.part.chain.trained, self._comm)
