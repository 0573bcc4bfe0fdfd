"""A step's micro-batches as every device sees them: layouts everywhere, contents where they are owned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from potluck.chain.comm import Comm
from potluck.pool.halves import decode_layouts, encode_layouts
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch, Layout


@dataclass(frozen=True)
class MicroBatch:
    """One micro-batch as this device sees it: contents only where they are owned."""

    owner: int
    layout: Layout
    batch: Batch | None

    @property
    def targets(self) -> int:
        """Supervised positions."""
        return sum(len(positions) for positions in self.layout.positions)


def exchange(turns: Sequence[Turn], comm: Comm) -> list[MicroBatch]:
    """The micro-batches of all turns, whose layouts their owners tell everyone."""
    return [each for turn in turns for each in _exchanged(turn, comm)]


def told_everyone(micro_batch: MicroBatch, comm: Comm) -> MicroBatch:
    """The same with its token ids and targets on every device; segments stay, as no such model says tokens."""
    if comm.group is None:
        return micro_batch
    layout, batch = micro_batch.layout, micro_batch.batch
    B, S, N = len(layout.lengths), max(layout.lengths), micro_batch.targets
    content = torch.empty(B * S + N, dtype=torch.long)
    if batch is not None:
        content = torch.cat((batch.ids_BS[:, :S].flatten(), batch.targets_N))
    ids_M, targets_N = comm.broadcast(content, micro_batch.owner).wait().split([B * S, N])
    return replace(micro_batch, batch=Batch(ids_M.view(B, S), targets_N, layout))


def _exchanged(turn: Turn, comm: Comm) -> list[MicroBatch]:
    batches, owner = turn.batches, turn.owner
    if comm.group is None:
        assert batches is not None
        return [MicroBatch(owner, batch.layout, batch) for batch in batches]
    encoded = torch.empty(0) if batches is None else encode_layouts([batch.layout for batch in batches])
    size = comm.broadcast(torch.tensor([encoded.numel()]), owner).wait()
    content = torch.empty(int(size), dtype=torch.long) if batches is None else encoded
    layouts = decode_layouts(comm.broadcast(content, owner).wait())
    return [MicroBatch(owner, layout, None if batches is None else batches[m]) for m, layout in enumerate(layouts)]
