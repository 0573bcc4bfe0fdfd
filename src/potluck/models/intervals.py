"""Sets of half-open intervals ``[start, stop)`` of bytes, as sorted, disjoint ``int64`` arrays of shape ``(n, 2)``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.int64]


def from_runs(runs: Sequence[tuple[int, int]]) -> Intervals:
    """The bytes of runs ``(offset, length)``; they may overlap, touch or be empty."""
    pairs = np.array(runs, dtype=np.int64).reshape(-1, 2)
    return union(np.stack([pairs[:, 0], pairs[:, 0] + pairs[:, 1]], axis=1))


def to_runs(intervals: Intervals) -> list[tuple[int, int]]:
    """Runs ``(offset, length)``, the inverse of :func:`from_runs`."""
    return [(start, stop - start) for start, stop in intervals.tolist()]


def union(*sets: Intervals) -> Intervals:
    """What is in any of the sets; neighbours that touch become one interval."""
    pairs = np.concatenate(sets)
    pairs = pairs[pairs[:, 1] > pairs[:, 0]]
    if len(pairs) == 0:
        return pairs
    pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
    reach = np.maximum.accumulate(pairs[:, 1])
    first = np.concatenate([[True], pairs[1:, 0] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.stack([pairs[first, 0], reach[last]], axis=1)


def without(wanted: Intervals, present: Intervals) -> Intervals:
    """What is in ``wanted`` and not in ``present``."""
    if len(wanted):
        present = present[(present[:, 1] > wanted[0, 0]) & (present[:, 0] < wanted[-1, 1])]
    if len(wanted) == 0 or len(present) == 0:
        return wanted
    edges = np.unique(np.concatenate([wanted.ravel(), present.ravel()]))
    starts, stops = edges[:-1], edges[1:]
    missing = _holds(wanted, starts) & ~_holds(present, starts)
    return union(np.stack([starts[missing], stops[missing]], axis=1))


def size(intervals: Intervals) -> int:
    """Bytes in a set."""
    return int((intervals[:, 1] - intervals[:, 0]).sum())


def checked(content: Any, file_size: int) -> Intervals | None:
    """``content`` if it is a set of intervals within a file of that size, else None."""
    if not (isinstance(content, np.ndarray) and content.dtype == np.int64 and content.ndim == 2):
        return None
    if content.shape[1] != 2 or (content.size and (content.min() < 0 or content.max() > file_size)):
        return None
    flat = content.ravel()
    return content if bool((flat[1:] > flat[:-1]).all()) else None


def _holds(intervals: Intervals, points: NDArray[np.int64]) -> NDArray[np.bool_]:
    before = np.searchsorted(intervals[:, 0], points, side="right") - 1
    return np.asarray((before >= 0) & (points < intervals[np.maximum(before, 0), 1]))
