"""A micro-batch dealt into the half-batches that are in flight together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.texts.batch import Batch, Layout


@dataclass(frozen=True)
class Half:
    """Some rows of a micro-batch, padded to the longest of them. Token ids and targets only where they are owned."""

    shape_BS: tuple[int, int]
    positions_N: Tensor
    """Supervised positions as indices into ``B * S``."""
    ids_BS: Tensor | None = None
    targets_N: Tensor | None = None
    types_BS: Tensor | None = None
    """Segments of tokens, where they are owned and there is more than one."""
    lengths_B: Tensor | None = None
    """Tokens of each row, int64."""


def deal(layout: Layout, batch: Batch | None, halves: int) -> list[Half]:
    """Deal rows to one or two halves, every other row to the same one; a single row walks alone.

    Batches come sorted by length, so that both halves are about equally long. Every device computes the same from the
    layout; the owner passes its ``batch`` too.
    """
    B = len(layout.lengths)
    parts = [range(B)] if halves == 1 or B == 1 else [range(0, B, 2), range(1, B, 2)]
    offsets = [0]
    for positions in layout.positions:
        offsets.append(offsets[-1] + len(positions))
    dealt = []
    for rows in parts:
        S = max(layout.lengths[row] for row in rows)
        flat = [i * S + position for i, row in enumerate(rows) for position in layout.positions[row]]
        ids_BS = targets_N = types_BS = None
        if batch is not None:
            types_BS = None if batch.types_BS is None else batch.types_BS[list(rows), :S]
            ids_BS = batch.ids_BS[list(rows), :S]
            targets_N = torch.cat([batch.targets_N[offsets[row] : offsets[row + 1]] for row in rows])
        lengths_B = torch.tensor([layout.lengths[row] for row in rows])
        positions_N = torch.tensor(flat, dtype=torch.long)
        dealt.append(Half((len(rows), S), positions_N, ids_BS, targets_N, types_BS, lengths_B))
    return dealt


def encode_layouts(layouts: Sequence[Layout]) -> Tensor:
    """Layouts of a step's micro-batches as int64, for one message."""
    numbers = [len(layouts)]
    for layout in layouts:
        numbers.append(len(layout.lengths))
        for length, positions in zip(layout.lengths, layout.positions, strict=True):
            numbers += [length, len(positions), *positions]
    return torch.tensor(numbers, dtype=torch.long)


def decode_layouts(encoded: Tensor) -> list[Layout]:
    """The layouts :func:`encode_layouts` wrote."""
    numbers = iter(encoded.tolist())
    layouts = []
    for _ in range(next(numbers)):
        lengths, positions = [], []
        for _ in range(next(numbers)):
            lengths.append(next(numbers))
            positions.append(tuple(next(numbers) for _ in range(next(numbers))))
        layouts.append(Layout(tuple(lengths), tuple(positions)))
    return layouts
