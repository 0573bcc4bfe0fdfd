"""Devices run side by side: started, listened to, and all ended whatever happens.

A device reads one JSON line (its spec) from stdin and writes JSON lines (its events) to stdout. Its stdin stays open
for as long as the parent lives: the end of that file tells a device that nobody waits for it any more, also where the
parent was killed and could not say so. A device of another machine is told and heard by way of the control channel.
"""

import json
import queue
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.pool.process import Arrivals, Device, Event, LocalDevice, end_all

__all__ = ["Event", "PeerLost", "run_devices"]

# -P: nothing is imported from the directory that the person happens to be in
_DEVICE_COMMAND = (sys.executable, "-P", "-m", "potluck.pool.device")


def run_devices(
    specs: Sequence[Mapping[str, object]],
    on_event: Callable[[Event], None],
    *,
    remote: Sequence[Device] = (),
    command: Sequence[str] = _DEVICE_COMMAND,
    check: Callable[[], None] = lambda: None,
    settle_s: float = 2.0,
    grace_s: float = 3.0,
) -> None:
    """Run one process a spec until all have finished; whatever ends this function ends every device first.

    Args:
        specs: what each device is told, as one JSON line; has its ``name``.
        on_event: called in this thread with each event but ``error``, in the order of arrival.
        remote: devices of other machines that take part too.
        command: the program of a local device.
        check: called now and then; what it raises ends the run.
        settle_s: seconds to listen on after a first failure, so that the cause is reported and not a consequence.
        grace_s: seconds between asking a device to end (SIGTERM) and killing it.

    Raises:
        BadInput: a device refused what the person gave.
        DeviceLost: a device ended without a word.
        PeerLost: a device lost another one, of which nothing was heard.
        PotluckError: a device reported another error.
    """
    arrivals: Arrivals = queue.Queue()
    devices: list[Device] = []
    try:
        for spec in specs:
            devices.append(LocalDevice(spec, command))
        devices += remote
        for device in devices:
            device.start(arrivals)
        _listen([_Heard(device) for device in devices], arrivals, on_event, check, settle_s, grace_s)
    finally:
        end_all(devices, grace_s)


class PeerLost(DeviceLost):
    """A device lost the connection to another one, which knows more of the cause."""


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
class _Heard:
    """What a device has said so far."""

    device: Device
    finished: bool = False
    closed: bool = False
    failed: bool = False


def _listen(
    all_heard: Sequence[_Heard],
    arrivals: Arrivals,
    on_event: Callable[[Event], None],
    check: Callable[[], None],
    settle_s: float,
    grace_s: float,
) -> None:
    of_device = {id(heard.device): heard for heard in all_heard}
    failures: list[_Failure] = []
    deadline = float("inf")
    while not all(heard.closed for heard in all_heard):
        if time.monotonic() > deadline:
            break
        check()
        try:
            device, said = arrivals.get(timeout=0.1)
        except queue.Empty:
            continue
        heard = of_device[id(device)]
        event = _parse(device, said) if isinstance(said, bytes) else said
        failure = None
        if said is None:
            heard.closed = True
            failure = _how_it_ended(heard, grace_s)
        elif event is None:
            continue
        elif event["event"] == "error":
            heard.failed = True
            failure = _reported(device, event)
        else:
            heard.finished |= event["event"] == "finished"
            on_event(event)
        if failure is not None:
            failures.append(failure)
            deadline = min(deadline, time.monotonic() + settle_s)
            if failure.cause is _Cause.REFUSED:
                break
        if all(heard.finished for heard in all_heard):
            deadline = min(deadline, time.monotonic() + grace_s)
    if failures:
        raise min(failures, key=lambda failure: failure.cause).error


def _parse(device: Device, line: bytes) -> Event | None:
    """The event on a line; None where a library printed to stdout, which is kept with stderr."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    if isinstance(event, dict) and "event" in event:
        return event
    device.remember(line)
    return None


def _reported(device: Device, event: Event) -> _Failure:
    message = str(event.get("message", "an error without a message"))
    if event.get("exit_code") == BadInput.exit_code:
        failure = _Failure(_Cause.REFUSED, BadInput(message))
    elif event.get("kind") == "left":
        failure = _Failure(_Cause.BROKE, DeviceLost(message))
    else:
        named = message if device.name in message else f"{device.name}: {message}"
        if event.get("kind") == "peer":
            failure = _Failure(_Cause.LOST_A_PEER, PeerLost(named))
        else:
            failure = _Failure(_Cause.BROKE, PotluckError(named))
    if event.get("traceback"):
        failure.error.add_note(f"On {device.name}:\n{event['traceback']}")
    if words := device.last_words():
        failure.error.add_note(f"Standard error of {device.name}:\n{words}")
    return failure


def _how_it_ended(heard: _Heard, grace_s: float) -> _Failure | None:
    """What is to be said of a device that says no more; None if all was said before."""
    device = heard.device
    ending = device.ending(heard.finished, grace_s)
    if ending is None or heard.failed:
        return None
    error = DeviceLost(f"{device.name} {ending}. The other devices were ended; nothing was saved.")
    if words := device.last_words():
        if device.crashed():
            error = DeviceLost(f"{error}\nIts last words were:\n{words}")
        else:
            error.add_note(f"Standard error of {device.name}:\n{words}")
    return _Failure(_Cause.BROKE, error)
