"""What this machine is in a pool: its name, and how many threads a device of it computes with."""

import math
import os
import re
import socket

from potluck.control.members import NAME_PATTERN
from potluck.errors import BadInput
from potluck.pool.machine import usable_cores

_NICENESS = 10


def host_name() -> str:
    """This machine's name, without its domain."""
    return socket.gethostname().partition(".")[0] or "device"


def check_name(name: str) -> None:
    """See that a device can be called so.

    Raises:
        BadInput: it cannot.
    """
    if not (len(name) <= 64 and re.fullmatch(NAME_PATTERN, name)):
        raise BadInput(
            f"--name {name!r}: a device's name has at most 64 letters, digits, '.', '_', '-', and spaces or"
            " parentheses within."
        )


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
