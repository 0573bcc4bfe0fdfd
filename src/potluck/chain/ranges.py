"""Lists of half-open ranges: how a share says which rows or columns of a tensor a device holds."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranges:
    """Sorted, disjoint, non-empty half-open ranges ``[start, stop)`` along one dimension.

    ``Ranges(())`` is an empty share.
    """

    spans: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        end = -1
        for start, stop in self.spans:
            if not (0 <= start < stop and start >= end):
                raise ValueError(f"ranges must be sorted, disjoint and non-empty: {self.spans}")
            end = stop

    @classmethod
    def of(cls, start: int, stop: int) -> "Ranges":
        """One range, or none where ``start == stop``."""
        return cls(((start, stop),)) if stop > start else cls(())

    @classmethod
    def covering(cls, indices: Iterable[int]) -> "Ranges":
        """The fewest ranges that hold exactly these indices."""
        spans: list[tuple[int, int]] = []
        for i in sorted(set(indices)):
            if spans and spans[-1][1] == i:
                spans[-1] = (spans[-1][0], i + 1)
            else:
                spans.append((i, i + 1))
        return cls(tuple(spans))

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.spans)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.spans:
            yield from range(start, stop)

    def scaled(self, unit: int, offset: int = 0) -> "Ranges":
        """Each index as a block of ``unit`` rows, moved by ``offset``: heads as rows of a fused projection."""
        return Ranges(tuple((offset + start * unit, offset + stop * unit) for start, stop in self.spans))

    def __str__(self) -> str:
        return ", ".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in self.spans) or "none"


def joined(*parts: Ranges) -> Ranges:
    """Ranges one behind the other, as where one tensor holds several linears."""
    return Ranges(tuple(span for part in parts for span in part.spans))


def split_by(counts: Iterable[int]) -> tuple[Ranges, ...]:
    """Consecutive ranges of the given lengths, one a device."""
    ranges, start = [], 0
    for count in counts:
        ranges.append(Ranges.of(start, start + count))
        start += count
    return tuple(ranges)
