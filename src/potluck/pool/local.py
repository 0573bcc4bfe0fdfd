"""How a device of this machine computes: how many threads, and how fast."""

import math
import os

from potluck.errors import BadInput
from potluck.pool.machine import usable_cores

_NICENESS = 10


def check_pace(pace: float | None) -> None:
    """See that an emulated device can have this speed.

    Raises:
        BadInput: it cannot.
    """
    if pace is not None and not (math.isfinite(pace) and 0 < pace <= 1):
        raise BadInput(f"pace: a paced device has a speed above 0 and at most 1, not {pace}.")


def threads_of(asked: int, *, devices: int = 1, nice: bool = False, paced: bool = False) -> int:
    """Threads a device computes with.

    Args:
        asked: what the person asked for; 0 for the machine's cores, divided among its devices.
        devices: how many share the machine.
        nice: leave half of the cores to the people who use the machine.
        paced: an emulated device, whose only thread is slowed.
    """
    if paced:
        return 1
    usable = max(1, usable_cores() // 2) if nice else usable_cores()
    a_device = max(1, usable // devices)
    if not asked:
        return a_device
    return min(asked, a_device) if nice else asked


def stand_back() -> None:
    """Let this process give way to what people do on this machine; once is as good as twice."""
    os.nice(max(0, _NICENESS - os.nice(0)))
