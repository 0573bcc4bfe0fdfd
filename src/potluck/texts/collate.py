"""Examples to one padded micro-batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.texts.batch import Batch, Example, Layout


def collate(examples: Sequence[Example]) -> Batch:
    """Pad on the right with 0 and list the targets.

    Returns:
        ``ids_BS``: int64, S the longest example's length. ``targets_N``: int64, row by row: the token after each
        supervised position, or each example's label: the index of a class, or the bits of a value in float64, so that
        whatever moves targets moves values too. The padding id means nothing: lengths say what is padding.
        ``types_BS``: int64, where an example has a second text.

    Raises:
        ValueError: there is no example, or only some have a label.
    """
    if not examples:
        raise ValueError("a micro-batch needs at least one example")
    lengths = tuple(len(example.ids) for example in examples)
    ids_BS = _padded([example.ids for example in examples])
    types_BS = None
    if any(example.types is not None for example in examples):
        types_BS = _padded([example.types or (0,) * len(example.ids) for example in examples])
    labels = [example.label for example in examples if example.label is not None]
    places = [(example.reads_at,) for example in examples if example.reads_at is not None]
    if labels or places:
        if not len(labels) == len(places) == len(examples):
            raise ValueError("the examples of a micro-batch have a label and where it is read all together, or none")
        return Batch(ids_BS, _as_targets(labels), Layout(lengths, tuple(places)), types_BS)
    positions = tuple(
        tuple(token - 1 for token in range(1, len(example.ids)) if example.supervised[token]) for example in examples
    )
    targets = [example.ids[p + 1] for example, of_row in zip(examples, positions, strict=True) for p in of_row]
    return Batch(ids_BS, torch.tensor(targets, dtype=torch.int64), Layout(lengths, positions), types_BS)


def _as_targets(labels: Sequence[float]) -> Tensor:
    if all(isinstance(label, int) for label in labels):
        return torch.tensor(labels, dtype=torch.int64)
    return torch.tensor(labels, dtype=torch.float64).view(torch.int64)


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    padded_BS = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
    for at, row in enumerate(rows):
        padded_BS[at, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return padded_BS
