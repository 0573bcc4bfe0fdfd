"""How much of its cycles a thread stalls for memory, where the processor and the kernel count that.

Linux's ``perf_event_open``, of which there is no function in libc. Virtual machines often have no such counters.
"""

import ctypes
import os
import platform
import struct
from typing import Literal

_CALL = {"x86_64": 298, "aarch64": 241, "riscv64": 241}
_HARDWARE, _SOFTWARE = 0, 1
_KINDS = {"cycles": (_HARDWARE, 0), "stalled": (_HARDWARE, 8), "task_clock": (_SOFTWARE, 1)}
_ATTRIBUTE_BYTES = 112  # PERF_ATTR_SIZE_VER5
_EXCLUDE_KERNEL_AND_HYPERVISOR = 1 << 5 | 1 << 6

Kind = Literal["cycles", "stalled", "task_clock"]


class Counter:
    """One counter of the calling thread; its file is closed with the process."""

    def __init__(self, kind: Kind) -> None:
        """Start counting.

        Raises:
            OSError: the kernel or the processor does not count this.
        """
        number = _CALL.get(platform.machine())
        if number is None or os.name != "posix":
            raise OSError("this processor's counters are not known here")
        of_type, config = _KINDS[kind]
        flags = _EXCLUDE_KERNEL_AND_HYPERVISOR if of_type == _HARDWARE else 0
        attribute = struct.pack("=IIQQQQQ", of_type, _ATTRIBUTE_BYTES, config, 0, 0, 0, flags)
        libc = ctypes.CDLL(None, use_errno=True)
        self._file = libc.syscall(number, ctypes.c_char_p(attribute.ljust(_ATTRIBUTE_BYTES, b"\0")), 0, -1, -1, 0)
        if self._file < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def read(self) -> int:
        """What was counted so far."""
        (count,) = struct.unpack("=Q", os.read(self._file, 8))
        return int(count)


class Stalls:
    """The part of the calling thread's cycles in which nothing was done for want of data."""

    def __init__(self) -> None:
        """Start counting, where that is possible."""
        self._counters: tuple[Counter, Counter] | None = None
        try:
            self._counters = Counter("stalled"), Counter("cycles")
        except OSError:
            return
        self._before = tuple(counter.read() for counter in self._counters)

    def ratio(self) -> float | None:
        """Since the last call; None where it is not counted."""
        if self._counters is None:
            return None
        now = tuple(counter.read() for counter in self._counters)
        (stalled, cycles), self._before = (after - before for after, before in zip(now, self._before, strict=True)), now
        return stalled / cycles if cycles else None
