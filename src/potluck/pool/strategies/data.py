"""``data``: every device has the whole model, walks rows of its own alone, and gradients are summed once a step.

Rows of the whole step are dealt to devices by length and speed, as every device computes them from the layouts; an
owner sends the token ids and targets of a row to the device that walks it, and to no other. Or each owner walks the
rows it owns, and no id or label travels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from potluck.chain.comm import Comm, Message
from potluck.chain.heads import head_loss_alone
from potluck.chain.piece import At
from potluck.chain.trained_embedding import TrainedEmbedding
from potluck.chain.whole import Whole
from potluck.models.build import Part
from potluck.pool.dealing import deal_rows
from potluck.pool.gather import gather_whole
from potluck.pool.gradients import hold
from potluck.pool.halves import deal
from potluck.pool.micro_batch import MicroBatch
from potluck.pool.reduce import reduce_to_homes, spread_from_homes
from potluck.texts.batch import Batch, Layout
from potluck.texts.order import micro_batches as consecutive

_ROWS_TAG = 1


@dataclass(frozen=True)
class RowPlace:
    """A row of a step, as every device knows it."""

    owner: int
    micro_batch: int
    row: int
    length: int
    positions: tuple[int, ...]
    """Its supervised positions."""


@dataclass(frozen=True)
class Row:
    """A row where it is walked."""

    place: RowPlace
    ids_S: Tensor
    targets_N: Tensor
    types_S: Tensor | None = None
    """Segments of its tokens, in families that have several."""

    @property
    def content(self) -> list[Tensor]:
        """What is sent of it, int64."""
        return [self.ids_S, self.targets_N, *([] if self.types_S is None else [self.types_S])]


class DataParallel:
    """See :class:`potluck.pool.strategies.strategy.Strategy`."""

    def __init__(
        self,
        part: Part,
        comm: Comm,
        *,
        speeds: Sequence[float] | None,
        micro_batch_size: int | None,
        checkpointing: bool,
        seed: int,
    ) -> None:
        """Prepare this device's walks.

        Args:
            part: the whole model, built as the one share of one rank.
            comm: the messages.
            speeds: of all ranks, by which rows are dealt; None where each owner walks its own.
            micro_batch_size: rows walked at once, at most; all of them if None.
            checkpointing: recompute each piece in the backward walk.
            seed: from which masks of dropout follow.

        Raises:
            ValueError: there is not one speed a rank, or none is above 0.
        """
        if speeds is not None and (len(speeds) != comm.world_size or not max(speeds) > 0 or min(speeds) < 0):
            raise ValueError(f"{comm.world_size} devices need a speed each, one of them above 0: {list(speeds)}")
        self.part, self._comm = part, comm
        # "equal": once a walk has brought them home, gradients need no other sum
        self._trained = [replace(t, dim=None, held=(), gradient="equal") for t in part.chain.trained]
        self.held = hold(self._trained, comm.rank, comm.world_size)
        self._speeds, self._micro_batch_size, self._seed = speeds, micro_batch_size, seed
        self._whole = Whole(part.chain, checkpointing=checkpointing)

    def walk(self, micro_batches: Sequence[MicroBatch], step: int, step_targets: int) -> Tensor:
        """Walk this device's rows of the step and bring gradients home; where a tensor has no home here, none stays."""
        dealt = self._dealt(micro_batches)
        comm = self._comm
        leaving = list(self._send_rows(dealt, micro_batches))
        rows = self._rows(dealt[comm.rank], micro_batches)
        total = torch.zeros((), dtype=torch.float64)
        for i, batch in enumerate(_batches(rows, self._micro_batch_size)):
            total += self._walked(batch, At(self._seed, step, comm.rank, i), step_targets)
        for message in leaving:
            message.wait()
        reduce_to_homes(self.held, [rank for rank, places in enumerate(dealt) if places], comm)
        return total

    def spread(self) -> None:
        """Everything from its home."""
        spread_from_homes(self.held, self._comm)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Rank 0 has everything."""
        return gather_whole(self._trained, self._comm)

    def _dealt(self, micro_batches: Sequence[MicroBatch]) -> list[list[RowPlace]]:
        """For each rank the rows it walks; rows without a target teach nothing and are left out."""
        places = [
            RowPlace(each.owner, m, row, length, positions)
            for m, each in enumerate(micro_batches)
            for row, (length, positions) in enumerate(zip(each.layout.lengths, each.layout.positions, strict=True))
            if positions
        ]
        if self._speeds is None:
            return [[place for place in places if place.owner == rank] for rank in range(self._comm.world_size)]
        dealt = deal_rows([place.length for place in places], self._speeds)
        return [sorted((places[i] for i in rows), key=lambda place: place.owner) for rows in dealt]

    def _send_rows(self, dealt: Sequence[Sequence[RowPlace]], micro_batches: Sequence[MicroBatch]) -> Iterator[Message]:
        """Start sending the rows that are owned here and walked elsewhere, one message a device."""
        rank = self._comm.rank
        for other, places in enumerate(dealt):
            mine = [self._owned(place, micro_batches) for place in places if other != rank and place.owner == rank]
            if mine:
                content = torch.cat([part for row in mine for part in row.content])
                yield self._comm.start_send(content, other, _ROWS_TAG, exact=True)

    def _rows(self, places: Sequence[RowPlace], micro_batches: Sequence[MicroBatch]) -> list[Row]:
        """What this device walks, of its own data and of what others send."""
        rows: list[Row] = []
        asked: list[tuple[list[RowPlace], Message]] = []
        for owner, group in groupby(places, key=lambda place: place.owner):
            owned = list(group)
            if owner == self._comm.rank:
                rows += [self._owned(place, micro_batches) for place in owned]
            else:
                content = torch.empty(sum(sum(self._sizes(place)) for place in owned), dtype=torch.long)
                asked.append((owned, self._comm.start_receive(content, owner, _ROWS_TAG)))
        for owned, message in asked:
            parts = iter(message.wait().split([size for place in owned for size in self._sizes(place)]))
            rows += [Row(place, *(next(parts) for _ in self._sizes(place))) for place in owned]
        return rows

    def _sizes(self, place: RowPlace) -> list[int]:
        """Numbers of each part of a row's content."""
        return [place.length, len(place.positions), *([place.length] if self.part.segments else [])]

    def _owned(self, place: RowPlace, micro_batches: Sequence[MicroBatch]) -> Row:
        batch = micro_batches[place.micro_batch].batch
        assert batch is not None
        first = sum(len(positions) for positions in batch.layout.positions[: place.row])
        ids_S = batch.ids_BS[place.row, : place.length]
        types_S = None
        if self.part.segments:
            types_S = torch.zeros_like(ids_S) if batch.types_BS is None else batch.types_BS[place.row, : place.length]
        return Row(place, ids_S, batch.targets_N[first : first + len(place.positions)], types_S)

    def _walked(self, batch: Batch, at: At, step_targets: int) -> Tensor:
        """Walk a few rows both ways; their part of the loss."""
        part, (half,) = self.part, deal(batch.layout, batch, 1)
        assert half.ids_BS is not None
        assert half.targets_N is not None
        x_BSD = part.embedding(half.ids_BS, part.stream, half.types_BS).requires_grad_(bool(part.chain.first_trained))
        h_ND = self._whole(x_BSD, half.positions_N, replace(at, lengths_B=half.lengths_B))
        loss, gradient_ND = head_loss_alone(part.head, h_ND.detach(), half.targets_N, step_targets)
        if h_ND.requires_grad:
            h_ND.backward(gradient_ND)
        if isinstance(part.embedding, TrainedEmbedding) and x_BSD.grad is not None:
            part.embedding.add_gradient(x_BSD.grad, half.ids_BS, half.types_BS)
        return loss.double()


def _batches(rows: Sequence[Row], size: int | None) -> Iterator[Batch]:
    """Rows of about one length together, at most ``size`` and evenly many, padded to their longest."""
    if not rows:
        return
    by_length = sorted(rows, key=lambda row: row.place.length)
    count = math.ceil(len(rows) / (size or len(rows)))
    for indices in consecutive(range(len(rows)), math.ceil(len(rows) / count)):
        these = [by_length[i] for i in indices]
        layout = Layout(tuple(r.place.length for r in these), tuple(r.place.positions for r in these))
        ids_BS = pad_sequence([row.ids_S for row in these], batch_first=True)
        types = [row.types_S for row in these if row.types_S is not None]
        types_BS = pad_sequence(types, batch_first=True) if types else None
        yield Batch(ids_BS, torch.cat([row.targets_N for row in these]), layout, types_BS)
