"""Which device walks which rows in the strategy ``data``."""

from collections.abc import Sequence


def deal_rows(lengths: Sequence[int], speeds: Sequence[float]) -> list[list[int]]:
    """The rows each device walks, so that the slowest device's ``tokens / speed`` is small.

    Longest rows first, each to the device that would be done with it first; then single rows are moved away from the
    slowest device, or swapped with others', as long as that helps. The first part alone is at most
    ``2 - 2 / (m + 1)`` times the optimum of ``m`` devices (Gonzalez, Ibarra and Sahni, 1977), and optimal where all
    rows are equally long; the second only improves on it. Every device that computes it comes to the same rows.

    Args:
        lengths: tokens of each row.
        speeds: of each device, in any unit; a device with 0 gets no row.

    Returns:
        For each device the indices of its rows, ascending; perhaps none.

    Raises:
        ValueError: no device has a speed above 0, or one has a speed below.
    """
    if not any(speeds) or min(speeds) < 0:
        raise ValueError(f"rows need devices with a speed above 0: {list(speeds)}")
    fastest_first = sorted((d for d, speed in enumerate(speeds) if speed), key=lambda d: -speeds[d])
    dealt: list[list[int]] = [[] for _ in speeds]
    tokens = [0] * len(speeds)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        device = min(fastest_first, key=lambda d: (tokens[d] + lengths[row]) / speeds[d])
        dealt[device].append(row)
        tokens[device] += lengths[row]
    while change := _improvement(lengths, speeds, dealt, tokens, fastest_first):
        slowest, row, other, back = change
        _move(lengths, dealt, tokens, row, slowest, other)
        if back is not None:
            _move(lengths, dealt, tokens, back, other, slowest)
    return [sorted(rows) for rows in dealt]


def _improvement(
    lengths: Sequence[int],
    speeds: Sequence[float],
    dealt: Sequence[Sequence[int]],
    tokens: Sequence[int],
    devices: Sequence[int],
) -> tuple[int, int, int, int | None] | None:
    """The slowest device, a row it gives away, to whom, and what it takes back if anything; None if nothing helps."""
    slowest = max(devices, key=lambda d: tokens[d] / speeds[d])
    best_s, best = tokens[slowest] / speeds[slowest], None
    for row in dealt[slowest]:
        for other in devices:
            for back in () if other == slowest else (None, *dealt[other]):
                given = lengths[row] - (0 if back is None else lengths[back])
                if given <= 0:
                    continue
                both_s = max((tokens[slowest] - given) / speeds[slowest], (tokens[other] + given) / speeds[other])
                if both_s < best_s:
                    best_s, best = both_s, (slowest, row, other, back)
    return best


def _move(
    lengths: Sequence[int], dealt: list[list[int]], tokens: list[int], row: int, source: int, target: int
) -> None:
    dealt[source].remove(row)
    dealt[target].append(row)
    tokens[source] -= lengths[row]
    tokens[target] += lengths[row]
