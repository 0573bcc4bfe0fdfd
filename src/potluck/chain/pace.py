"""A device slowed to a part of this machine's speed, to try out pools of uneven devices on one machine.

A cgroup CPU quota lets bursts of a few milliseconds through at full speed, and a device computes no longer than that
between two messages. So each device counts the CPU seconds of its own thread, and sleeps before each message until they
would have passed at its speed.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_COMPUTE_PRIORITY, _MESSAGES_PRIORITY, _HANDING_OVER_PRIORITY = 1, 2, 3
_LARGEST_CREDIT_S = 0.02
_NO_WAIT_S = 0.0002


class Pace:
    """Makes the calling thread's compute take ``1 / speed`` times as long; one thread a device."""

    def __init__(self, speed: float) -> None:
        """Start the clock; ``speed`` is the part of a core this device is, above 0 and at most 1.

        Raises:
            ValueError: the speed lies outside.
        """
        if not 0 < speed <= 1:
            raise ValueError(f"a paced device has a speed above 0 and at most 1, not {speed}")
        self.speed = speed
        self._start_s = self._caught_up_s = time.perf_counter()
        self._start_cpu_s = time.thread_time()

    def clock(self) -> float:
        """Seconds that this thread's compute so far takes at its speed."""
        return time.thread_time() / self.speed

    def catch_up(self) -> None:
        """Sleep until what was computed since the last call, or since :meth:`restart`, would have been computed.

        Up to 20 ms that a sleep took too long, or that another device's turn on this core took, are made up for by
        the next ones.
        """
        cpu_s = time.thread_time()
        due_s = self._start_s + (cpu_s - self._start_cpu_s) / self.speed
        now_s = time.perf_counter()
        if due_s > now_s:
            time.sleep(due_s - now_s)
            now_s = time.perf_counter()
        self._start_s = max(due_s, now_s - _LARGEST_CREDIT_S)
        self._start_cpu_s = time.thread_time()
        self._caught_up_s = now_s

    def restart(self) -> None:
        """Count from now: what passed before was waiting, not computing.

        Where there was next to no wait since :meth:`catch_up`, what is to be made up for stays so.
        """
        now_s = time.perf_counter()
        if now_s - self._caught_up_s > _NO_WAIT_S:
            self._start_s = now_s
        self._start_cpu_s = time.thread_time()


@contextmanager
def handing_over() -> Iterator[None]:
    """Go before the threads that carry messages for the moment in which this one hands them a message.

    Gloo's thread tries a connection's lock and, where it is taken, asks at once for the same event again. Going before
    this thread while this one holds that lock, it would do so for ever. Of no effect where :func:`come_first` has none.
    """
    _set_own_priority(_HANDING_OVER_PRIORITY)
    try:
        yield
    finally:
        _set_own_priority(_COMPUTE_PRIORITY)


def _set_own_priority(priority: int) -> None:
    with suppress(AttributeError, OSError):  # not Linux, or no real-time thread
        os.sched_setparam(0, os.sched_param(priority))


def come_first() -> bool:
    """Let this process, one device, go before what else this machine does; False where the system does not permit it.

    The calling thread computes; the process's other threads, which carry its messages, go before it. Call it once the
    group is made, and again for each new group: threads and processes that start later are ordinary ones.

    More devices than cores take turns, and the kernel may let a thread that wakes wait for the next tick, 4 ms later:
    as long as a whole segment. ``potluck testbed calibrate`` shows whether devices keep their speeds. What makes
    real-time threads harmless is that a paced one sleeps, and that the kernel keeps 5 % for the rest.
    """
    try:
        own = threading.get_native_id()
        for thread in (int(path.name) for path in Path("/proc/self/task").iterdir()):
            with suppress(ProcessLookupError):  # it has just ended
                priority = os.sched_param(_COMPUTE_PRIORITY if thread == own else _MESSAGES_PRIORITY)
                os.sched_setscheduler(thread, os.SCHED_RR | os.SCHED_RESET_ON_FORK, priority)
    except (AttributeError, OSError):  # not Linux, or not permitted
        return False
    return True
