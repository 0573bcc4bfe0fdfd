"""A step's micro-batches as every device sees them: layouts everywhere, contents where they are owned."""

from collections.abc import Sequence
from dataclasses import dataclass

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
