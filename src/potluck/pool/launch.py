"""Local devices as processes: started, listened to, and all ended whatever happens.

A device reads one JSON line (its spec) from stdin and writes JSON lines (its events) to stdout. Its stdin stays open
for as long as the parent lives: the end of that file tells a device that nobody waits for it any more, also where the
parent was killed and could not say so. Each device has a session of its own, so that Ctrl-C reaches only the parent.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import IO, Any

from potluck.errors import BadInput, DeviceLost, PotluckError

Event = dict[str, Any]

_STDERR_KEPT = 64 * 1024
_LAST_WORDS = 2_000
# -P: nothing is imported from the directory that the person happens to be in
_DEVICE_COMMAND = (sys.executable, "-P", "-m", "potluck.pool.device")


def run_devices(
    specs: Sequence[Mapping[str, object]],
    on_event: Callable[[Event], None],
    *,
    command: Sequence[str] = _DEVICE_COMMAND,
    settle_s: float = 2.0,
    grace_s: float = 3.0,
) -> None:
    """Run one process a spec until all have finished; whatever ends this function ends every device first.

    Args:
        specs: what each device is told, as one JSON line; has its ``name``.
        on_event: called in this thread with each event but ``error``, in the order of arrival.
        command: the program of a device.
        settle_s: seconds to listen on after a first failure, so that the cause is reported and not a consequence.
        grace_s: seconds between asking a device to end (SIGTERM) and killing it.

    Raises:
        BadInput: a device refused what the person gave.
        DeviceLost: a device ended without a word.
        PotluckError: a device reported another error.
    """
    arrivals: queue.Queue[tuple[_Device, bytes | None]] = queue.Queue()
    devices: list[_Device] = []
    try:
        for spec in specs:
            devices.append(_start(spec, command, arrivals))
        _listen(devices, arrivals, on_event, settle_s, grace_s)
    finally:
        _end(devices, grace_s)


class _Cause(IntEnum):
    """How near a failure is to the cause; the lowest is told."""

    REFUSED = 0
    BROKE = 1
    LOST_A_PEER = 2


@dataclass(frozen=True)
class _Failure:
    cause: _Cause
    error: PotluckError


@dataclass(eq=False)
class _Device:
    name: str
    process: "subprocess.Popen[bytes]"
    stderr: bytearray = field(default_factory=bytearray)
    readers: list[threading.Thread] = field(default_factory=list)
    finished: bool = False
    closed: bool = False
    failed: bool = False

    def remember(self, text: bytes) -> None:
        self.stderr += text
        del self.stderr[:-_STDERR_KEPT]

    def last_words(self) -> str:
        return self.stderr[-_LAST_WORDS:].decode(errors="replace").strip()


def _start(
    spec: Mapping[str, object], command: Sequence[str], arrivals: "queue.Queue[tuple[_Device, bytes | None]]"
) -> _Device:
    process = subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    device = _Device(name=str(spec.get("name", f"process {process.pid}")), process=process)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    device.readers = [
        threading.Thread(target=_read_events, args=(device, process.stdout, arrivals), daemon=True),
        threading.Thread(target=_read_stderr, args=(device, process.stderr), daemon=True),
    ]
    for reader in device.readers:
        reader.start()
    try:
        process.stdin.write(json.dumps(dict(spec)).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it has ended already: its exit status says more than this pipe does
    return device


def _read_events(device: _Device, stdout: IO[bytes], arrivals: "queue.Queue[tuple[_Device, bytes | None]]") -> None:
    for line in stdout:
        arrivals.put((device, line))
    arrivals.put((device, None))


def _read_stderr(device: _Device, stderr: IO[bytes]) -> None:
    while text := os.read(stderr.fileno(), 4096):
        device.remember(text)


def _listen(
    devices: Sequence[_Device],
    arrivals: "queue.Queue[tuple[_Device, bytes | None]]",
    on_event: Callable[[Event], None],
    settle_s: float,
    grace_s: float,
) -> None:
    failures: list[_Failure] = []
    deadline = float("inf")
    while not all(device.closed for device in devices):
        if time.monotonic() > deadline:
            break
        try:
            device, line = arrivals.get(timeout=0.1)
        except queue.Empty:
            continue
        event = None if line is None else _parse(device, line)
        failure = None
        if line is None:
            device.closed = True
            failure = _how_it_ended(device, grace_s)
        elif event is None:
            continue
        elif event["event"] == "error":
            device.failed = True
            failure = _reported(device, event)
        else:
            device.finished |= event["event"] == "finished"
            on_event(event)
        if failure is not None:
            failures.append(failure)
            deadline = min(deadline, time.monotonic() + settle_s)
            if failure.cause is _Cause.REFUSED:
                break
        if all(device.finished for device in devices):
            deadline = min(deadline, time.monotonic() + grace_s)
    if failures:
        raise min(failures, key=lambda failure: failure.cause).error


def _parse(device: _Device, line: bytes) -> Event | None:
    """The event on a line; None where a library printed to stdout, which is kept with stderr."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if isinstance(event, dict) and "event" in event:
        return event
    device.remember(line)
    return None


def _reported(device: _Device, event: Event) -> _Failure:
    message = str(event.get("message", "an error without a message"))
    if event.get("exit_code") == BadInput.exit_code:
        failure = _Failure(_Cause.REFUSED, BadInput(message))
    else:
        cause = _Cause.LOST_A_PEER if event.get("kind") == "peer" else _Cause.BROKE
        failure = _Failure(cause, PotluckError(message if device.name in message else f"{device.name}: {message}"))
    if event.get("traceback"):
        failure.error.add_note(f"On {device.name}:\n{event['traceback']}")
    if words := device.last_words():
        failure.error.add_note(f"Standard error of {device.name}:\n{words}")
    return failure


def _how_it_ended(device: _Device, grace_s: float) -> _Failure | None:
    """What the exit status says of a device whose stdout has closed; None if all was said before."""
    status: int | None
    try:
        status = device.process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        status = 0 if device.finished else None
    if device.failed or (device.finished and status == 0):
        return None
    device.readers[1].join(timeout=1.0)
    error = DeviceLost(f"{device.name} {_status_in_words(status)}. The other devices were ended; nothing was saved.")
    if words := device.last_words():
        if status is not None and status > 0:
            error = DeviceLost(f"{error}\nIts last words were:\n{words}")
        else:
            error.add_note(f"Standard error of {device.name}:\n{words}")
    return _Failure(_Cause.BROKE, error)


def _status_in_words(status: int | None) -> str:
    if status is None:
        return "closed its output and went on running"
    if status >= 0:
        return f"ended with exit code {status} without saying why"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    reason = "; perhaps the machine ran out of memory" if -status == signal.SIGKILL else ""
    return f"was killed by signal {-status} ({name}){reason}"


def _end(devices: Sequence[_Device], grace_s: float) -> None:
    """End every device that still runs; a second Ctrl-C skips the grace."""
    try:
        for device in devices:
            _signal(device, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        for device in devices:
            try:
                device.process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                break
    finally:
        for device in devices:
            _signal(device, signal.SIGKILL)
            device.process.wait()
        for device in devices:
            for reader in device.readers:
                reader.join(timeout=1.0)
            for stream in (device.process.stdin, device.process.stdout, device.process.stderr):
                _close(stream)


def _signal(device: _Device, number: signal.Signals) -> None:
    if device.process.poll() is None:
        os.killpg(device.process.pid, number)


def _close(stream: IO[bytes] | None) -> None:
    try:
        if stream is not None:
            stream.close()
    except BrokenPipeError:
        pass  # what was left to tell a device that is gone
