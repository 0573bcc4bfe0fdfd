from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.chain.ranges import Ranges, split_by

INDICES = st.sets(st.integers(0, 40))
COUNTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@given(INDICES)
def test_covering_holds_exactly_the_indices_in_as_few_spans_as_can_be(indices: set[int]) -> None:
    ranges = Ranges.covering([*indices, *indices])
    assert list(ranges) == sorted(indices)
    assert len(ranges) == len(indices)
    starts = sum(index - 1 not in indices for index in indices)
    assert len(ranges.spans) == starts
    assert bool(len(ranges)) == bool(indices)


@given(INDICES, st.integers(1, 7), st.integers(0, 30))
def test_scaled_makes_a_block_of_each_index(indices: set[int], unit: int, offset: int) -> None:
    blocks = Ranges.covering(indices).scaled(unit, offset)
    assert list(blocks) == [offset + index * unit + row for index in sorted(indices) for row in range(unit)]


@given(COUNTS)
def test_split_by_deals_every_index_once_in_order(counts: list[int]) -> None:
    parts = split_by(counts)
    assert [len(part) for part in parts] == counts
    assert [index for part in parts for index in part] == list(range(sum(counts)))


@given(INDICES)
def test_words_of_ranges_name_every_index(indices: set[int]) -> None:
    words = str(Ranges.covering(indices))
    if not indices:
        assert words == "none"
        return
    named: list[int] = []
    for span in words.split(", "):
        first, _, last = span.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(indices)


@pytest.mark.parametrize(
    "spans",
    [((3, 3),), ((-1, 2),), ((4, 6), (1, 2)), ((0, 3), (2, 5)), ((5, 4),)],
    ids=["", "<0", "order", "lap", "back"],
)
def test_spans_that_are_no_ranges_are_refused(spans: Sequence[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="sorted, disjoint and non-empty"):
        Ranges(tuple(spans))


def test_of_is_empty_where_nothing_is_held() -> None:
    assert Ranges.of(4, 4) == Ranges(())
    assert Ranges.of(4, 6) == Ranges(((4, 6),))
