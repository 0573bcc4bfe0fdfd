"""How much each device takes: the ratio in a job's ``devices``, and whole units by it."""

from collections.abc import Sequence
from fractions import Fraction

from potluck.errors import BadInput

MAX_LOCAL_DEVICES = 64


def parse_devices(devices: str) -> list[float]:
    """``"3"`` to three even parts, ``"3:2:1"`` to those parts.

    Raises:
        BadInput: it is neither.
    """
    try:
        parts = [float(part) for part in devices.split(":")]
    except ValueError:
        parts = []
    if len(parts) == 1:
        count = parts[0]
        parts = [1.0] * int(count) if 1 <= count <= MAX_LOCAL_DEVICES and count.is_integer() else []
    usable = all(part >= 0 for part in parts) and 0 < sum(parts) < float("inf")
    if not usable or not 1 <= len(parts) <= MAX_LOCAL_DEVICES:
        raise BadInput(
            f"devices: '{devices}' is neither a number of devices from 1 to {MAX_LOCAL_DEVICES}, such as 3,"
            " nor their shares, such as 3:2:1."
        )
    return parts


def apportion(total: int, ratio: Sequence[float]) -> list[int]:
    """Whole units by largest remainder; ties go to the larger part, then to the earlier device."""
    parts = [Fraction(part) for part in ratio]  # floats would lose ties to rounding, and the sum to overflow
    exact = [total * part / sum(parts) for part in parts]
    counts = [int(e) for e in exact]
    order = sorted(range(len(ratio)), key=lambda i: (-(exact[i] - counts[i]), -ratio[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def counts_of(unit: str, total: int, ratio: Sequence[float], by_hand: list[int] | None) -> list[int]:
    """How many of a model's ``total`` units each device holds: by ratio, or as the job's ``shares`` say.

    Raises:
        BadInput: numbers by hand are not as many as the devices, or do not make the total.
    """
    if by_hand is None:
        return apportion(total, ratio)
    numbers = ", ".join(str(count) for count in by_hand)
    if len(by_hand) != len(ratio):
        raise BadInput(f"shares.{unit}: {len(by_hand)} numbers ({numbers}) for {len(ratio)} devices.")
    if sum(by_hand) != total:
        names = {"heads": "query heads", "columns": "MLP columns", "vocab_rows": "vocabulary rows"}
        raise BadInput(f"shares.{unit}: {numbers} make {sum(by_hand)}, but the model has {total} {names[unit]}.")
    return by_hand
