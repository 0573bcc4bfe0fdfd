"""Examples to one padded micro-batch."""

from collections.abc import Sequence

import torch

from potluck.texts.batch import Batch, Example, Layout


def collate(examples: Sequence[Example]) -> Batch:
    """Pad on the right with 0 and list the targets.

    Returns:
        ``ids_BS``: int64, S the longest example's length. ``targets_N``: int64, the token after each supervised
        position, row by row. The padding id means nothing: lengths say what is padding.

    Raises:
        ValueError: there is no example.
    """
    if not examples:
        raise ValueError("a micro-batch needs at least one example")
    lengths = tuple(len(example.ids) for example in examples)
    ids_BS = torch.zeros(len(examples), max(lengths), dtype=torch.int64)
    for row, example in enumerate(examples):
        ids_BS[row, : len(example.ids)] = torch.tensor(example.ids, dtype=torch.int64)
    positions = tuple(
        tuple(token - 1 for token in range(1, len(example.ids)) if example.supervised[token]) for example in examples
    )
    targets = [example.ids[p + 1] for example, of_row in zip(examples, positions, strict=True) for p in of_row]
    return Batch(ids_BS, torch.tensor(targets, dtype=torch.int64), Layout(lengths, positions))
