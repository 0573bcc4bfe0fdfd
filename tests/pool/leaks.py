"""Whether a message holds token ids of somebody's texts."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from potluck.texts.batch import Batch

WINDOW = 3
"""Ids in a row that betray a text."""


def secrets(batches: Sequence[Batch]) -> set[tuple[int, ...]]:
    """Every run of ``WINDOW`` ids as rows, targets, or sorted sets of either could travel in."""
    sequences: list[list[int]] = []
    for each in batches:
        rows = [row[:n].tolist() for row, n in zip(each.ids_BS, each.layout.lengths, strict=True)]
        first = 0
        for row, positions in zip(rows, each.layout.positions, strict=True):
            sequences += [row, each.targets_N[first : first + len(positions)].tolist()]
            first += len(positions)
        sequences += [each.ids_BS.unique().tolist(), each.targets_N.tolist(), each.targets_N.unique().tolist()]
        sequences += [column[column > 0].tolist() for column in each.ids_BS.T]
    return {tuple(s[i : i + WINDOW]) for s in sequences for i in range(len(s) - WINDOW + 1)}


def readings(content: Tensor) -> Iterator[Tensor]:
    """The numbers of a message, and its bytes read as integers too wide to look like ids by chance."""
    flat = content.contiguous().flatten()
    yield flat.double()
    for integer in (torch.int16, torch.int32, torch.int64):
        if flat.nbytes % integer.itemsize == 0 and flat.numel():
            yield flat.view(torch.uint8).view(integer).double()


def leaks(content: Tensor, known: set[tuple[int, ...]], vocab_size: int) -> bool:
    """Whether the message holds ``WINDOW`` known ids in a row, as numbers or as bytes."""
    for numbers in readings(content):
        if numbers.numel() < WINDOW:
            continue
        windows_NW = numbers.unfold(0, WINDOW, 1)
        could_be_ids = ((windows_NW >= 0) & (windows_NW < vocab_size) & (windows_NW == windows_NW.round())).all(-1)
        if any(tuple(map(int, window)) in known for window in windows_NW[could_be_ids].tolist()):
            return True
    return False
