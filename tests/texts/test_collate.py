"""Padding, targets and positions of a micro-batch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.chain.classifier import values_of
from potluck.texts.batch import Example
from potluck.texts.collate import collate


def example(ids: list[int], supervised: list[bool]) -> Example:
    return Example(tuple(ids), tuple(supervised), where="x:1", prompt_length=1, answer=None)


def test_two_rows() -> None:
    batch = collate(
        [example([7, 8, 9], [False, True, True]), example([4, 0, 5, 0, 6], [False, True, False, False, True])]
    )
    assert batch.ids_BS.tolist() == [[7, 8, 9, 0, 0], [4, 0, 5, 0, 6]]
    assert batch.layout.lengths == (3, 5)
    assert batch.layout.positions == ((0, 1), (0, 3))
    assert batch.targets_N.tolist() == [8, 9, 0, 6]
    assert batch.ids_BS.dtype == batch.targets_N.dtype == torch.int64


@st.composite
def examples(draw: st.DrawFn) -> Example:
    flags = [False, *draw(st.lists(st.booleans(), max_size=12))]
    return example(draw(st.lists(st.integers(0, 5), min_size=len(flags), max_size=len(flags))), flags)


@given(st.lists(examples(), min_size=1, max_size=6))
def test_targets_follow_positions_row_by_row(rows: list[Example]) -> None:
    batch = collate(rows)
    said = [
        int(batch.ids_BS[row, position + 1])
        for row, positions in enumerate(batch.layout.positions)
        for position in positions
    ]
    assert batch.targets_N.tolist() == said
    assert len(said) == sum(sum(row.supervised) for row in rows)
    for row, length in enumerate(batch.layout.lengths):
        assert batch.ids_BS[row, :length].tolist() == list(rows[row].ids)
        assert not batch.ids_BS[row, length:].any()


def test_no_example_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        collate([])


def labelled(ids: list[int], label: float, reads_at: int, types: tuple[int, ...] | None = None) -> Example:
    return Example(tuple(ids), (False,) * len(ids), "x:1", len(ids), None, label, reads_at, types)


def test_labels_of_classes() -> None:
    batch = collate([labelled([2, 7, 3], 1, 0), labelled([2, 3], 0, 0, (0, 1))])
    assert batch.layout.lengths == (3, 2)
    assert batch.layout.positions == ((0,), (0,))
    assert batch.targets_N.tolist() == [1, 0]
    assert batch.targets_N.dtype == torch.int64
    assert batch.types_BS is not None
    assert batch.types_BS.tolist() == [[0, 0, 0], [0, 1, 0]]
    assert collate([labelled([2, 3], 0, 1)]).types_BS is None


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_values_travel_as_bits(values: list[float]) -> None:
    batch = collate([labelled([2, 3], value, 1) for value in values])
    assert batch.targets_N.dtype == torch.int64
    assert batch.layout.positions == ((1,),) * len(values)
    moved = batch.targets_N[torch.arange(len(values)).flip(0)]
    assert values_of(moved).tolist() == values[::-1]


def test_examples_of_two_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match="all together, or none"):
        collate([labelled([2, 3], 1, 0), example([4, 5], [False, True])])
