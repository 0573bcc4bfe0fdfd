import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from potluck.models.intervals import checked, from_runs, size, to_runs, union, without

RUNS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)), max_size=12)


def members(runs: list[tuple[int, int]]) -> set[int]:
    return {i for offset, length in runs for i in range(offset, offset + length)}


@given(RUNS, RUNS)
def test_they_are_sets_of_bytes(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    x, y = from_runs(a), from_runs(b)
    for found, expected in (
        (x, members(a)),
        (union(x, y), members(a) | members(b)),
        (without(x, y), members(a) - members(b)),
    ):
        runs = to_runs(found)
        assert members(runs) == expected
        assert size(found) == len(expected)
        ends = [offset + length for offset, length in runs]
        assert all(start > end for (start, _), end in zip(runs[1:], ends, strict=False)), "sorted, and none touch"
        assert checked(found, 80) is not None


def test_what_is_no_set_is_seen() -> None:
    good = np.array([[0, 4], [6, 8]])
    assert checked(good, 8) is good
    for bad in (good[::-1], good.astype(np.float64), good.ravel(), np.array([[0, 0]]), np.array([[-1, 2]]), "text"):
        assert checked(bad, 8) is None
    assert checked(good, 7) is None
