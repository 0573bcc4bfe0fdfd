"""A command on many devices at once: its lines told apart, all of it ended together."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import IO

from potluck.errors import BadInput, PotluckError
from potluck.testbed import cgroup
from potluck.testbed.enter import CANNOT_ENTER
from potluck.testbed.state import Testbed, TestDevice

_POLL_S = 0.02
_READERS_S = 5.0
_GRACES_S = ((signal.SIGINT, 5.0), (signal.SIGTERM, 3.0))


class Stream(IntEnum):
    """Where a device's line was written."""

    OUT = 1
    ERROR = 2


OnLine = Callable[[TestDevice, Stream, str], None]
"""Called with each line, without its end; never by two threads at once."""


@dataclass(frozen=True)
class Ended:
    """How a command ended on a device."""

    device: TestDevice
    returncode: int
    """As of ``subprocess``: negative is the signal that ended it."""
    out_of_memory: int
    """Processes of the device that were killed for its memory limit meanwhile."""

    @property
    def exit_status(self) -> int:
        """As a shell says it: 128 and the signal's number."""
        return self.returncode if self.returncode >= 0 else 128 - self.returncode

    def in_words(self) -> str:
        """One sentence on how it ended."""
        how = f"ended with status {self.returncode}"
        if self.returncode < 0:
            how = f"was ended by {_signal_name(-self.returncode)}"
        elif self.returncode == CANNOT_ENTER:
            how = f"ended with status {CANNOT_ENTER} (perhaps it could not be started)"
        if self.out_of_memory:
            limit_mib = (self.device.memory_bytes or 0) / (1 << 20)
            how += f"; {self.out_of_memory} process(es) were killed at its memory limit of {limit_mib:,.0f} MiB"
        return f"{self.device.name} {how}."


def run(
    testbed: Testbed,
    argv: Sequence[str],
    on_line: OnLine,
    on_end: Callable[[Ended], None] = lambda ended: None,
    *,
    devices: Sequence[TestDevice] | None = None,
) -> int:
    """Run ``argv`` on every device at once; the exit status that first was not 0, else 0.

    In ``argv``, ``{name}``, ``{speed}``, ``{address}``, ``{rank}`` and ``{world_size}`` become the device's own.
    Whatever ends this function, Ctrl-C included, ends what it started: SIGINT, then SIGTERM, then SIGKILL.

    Args:
        testbed: the testbed that is up.
        argv: the program, and what it is given.
        on_line: gets what the devices write.
        on_end: called in this thread as each device ends.
        devices: those to run on; all where None.

    Raises:
        BadInput: ``argv`` is empty.
        PotluckError: the machine could not start it.
    """
    if not argv:
        raise BadInput("There is no command to run: potluck testbed run -- CMD ...")
    alone = threading.Lock()
    running: list[_Running] = []
    status = 0
    try:
        for device in testbed.devices if devices is None else devices:
            running.append(_start(device, fill_in(argv, device, len(testbed.devices)), on_line, alone))
        waiting = list(running)
        while waiting:
            for each in [each for each in waiting if each.process.poll() is not None]:
                waiting.remove(each)
                ended = each.ended()
                status = status or ended.exit_status
                on_end(ended)
            time.sleep(_POLL_S if waiting else 0)
    finally:
        _end(running)
    return status


def fill_in(argv: Sequence[str], device: TestDevice, world_size: int) -> list[str]:
    """``argv`` with the device's own values in place of the words in braces; other braces stay as they are."""
    values = {
        "{name}": device.name,
        "{speed}": f"{device.speed:g}",
        "{address}": device.address,
        "{rank}": str(device.rank),
        "{world_size}": str(world_size),
    }
    filled = list(argv)
    for word, value in values.items():
        filled = [part.replace(word, value) for part in filled]
    return filled


@dataclass(eq=False)
class _Running:
    device: TestDevice
    process: "subprocess.Popen[str]"
    kills_before: int
    readers: list[threading.Thread] = field(default_factory=list)

    def ended(self) -> Ended:
        for reader in self.readers:
            reader.join(_READERS_S)
        kills = _kills(self.device) - self.kills_before
        return Ended(self.device, self.process.returncode, kills)


def _kills(device: TestDevice) -> int:
    return 0 if device.cgroup is None else cgroup.kills(device.cgroup)


def _start(device: TestDevice, argv: list[str], on_line: OnLine, alone: threading.Lock) -> _Running:
    kills_before = _kills(device)
    try:
        process = subprocess.Popen(
            device.command(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise PotluckError(f"{device.name}: nothing could be started: {error.strerror}.") from None
    started = _Running(device, process, kills_before)
    for stream, pipe in ((Stream.OUT, process.stdout), (Stream.ERROR, process.stderr)):
        assert pipe is not None
        reader = threading.Thread(target=_read, args=(device, stream, pipe, on_line, alone), daemon=True)
        reader.start()
        started.readers.append(reader)
    return started


def _read(device: TestDevice, stream: Stream, pipe: IO[str], on_line: OnLine, alone: threading.Lock) -> None:
    with pipe:
        for line in pipe:
            with alone:
                on_line(device, stream, line.removesuffix("\n"))


def _end(running: Sequence[_Running]) -> None:
    """End what still runs; a further Ctrl-C skips to the next, harder signal."""
    for number, patience_s in _GRACES_S:
        with suppress(KeyboardInterrupt):
            _signal_all(running, number)
            deadline = time.monotonic() + patience_s
            while any(each.process.poll() is None for each in running) and time.monotonic() < deadline:
                time.sleep(_POLL_S)
    _signal_all(running, signal.SIGKILL)
    for each in running:
        each.process.wait()
        for reader in each.readers:
            reader.join(_READERS_S)


def _signal_all(running: Sequence[_Running], number: signal.Signals) -> None:
    for each in running:
        if each.process.poll() is None:
            with suppress(ProcessLookupError):
                each.process.send_signal(number)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
