"""Which strategies' processes are in memory together: all of them if they fit, otherwise a few at a time.

Strategies are compared step by step in turn, since a machine's speed drifts. Where memory does not hold all of them,
each is compared in turn with the first one, which takes part in every sitting that has room for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OF_AVAILABLE = 0.9


@dataclass(frozen=True)
class Sittings:
    """Names that run together, and what runs in none."""

    together: tuple[tuple[str, ...], ...]
    left_out: dict[str, str]


def arrange(needed_bytes: Mapping[str, float], available_bytes: float) -> Sittings:
    """Arrange names, in their order, into sittings of at most 90 % of the available memory.

    Args:
        needed_bytes: of all processes of each name together; the first name is the one others are compared with.
        available_bytes: of the machine.
    """
    room = _OF_AVAILABLE * available_bytes
    left_out = {
        name: f"its processes need {size / 2**30:.1f} GiB together; {available_bytes / 2**30:.1f} GiB are available, of"
        f" which at most {_OF_AVAILABLE:.0%} are used."
        for name, size in needed_bytes.items()
        if size > room
    }
    names = [name for name in needed_bytes if name not in left_out]
    if not names:
        return Sittings((), left_out)
    first = names[0]
    sittings: list[list[str]] = [[first]]
    for name in names[1:]:
        fitting = [s for s in sittings if _sum(needed_bytes, [*s, name]) <= room]
        if fitting:
            fitting[0].append(name)
        else:
            beside_first = needed_bytes[first] + needed_bytes[name] <= room
            sittings.append([first, name] if beside_first else [name])
    alone_again = len(sittings) > 1 and sittings[0] == [first] and any(first in s for s in sittings[1:])
    return Sittings(tuple(tuple(s) for s in (sittings[1:] if alone_again else sittings)), left_out)


def _sum(needed_bytes: Mapping[str, float], names: Sequence[str]) -> float:
    return sum(needed_bytes[name] for name in names)
