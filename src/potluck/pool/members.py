"""Devices of other machines, as the coordinator sees them: run like local ones, by way of the front door."""

import contextlib
import queue
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from potluck.control.front_door import FrontDoor
from potluck.errors import DeviceLost, PotluckError, from_outside, in_words
from potluck.pool.process import Arrivals, Event

_NOT_OF_MEMBERS = {"left", "begin", "step", "ran_out", "saving", "saved"}
"""What only a front door says, or the coordinator's own device."""


class Members:
    """Everyone who has joined; what they say is handed to whoever runs them at the moment.

    As a context manager it tells them all, when it ends, how the run ended.
    """

    def __init__(self, door: FrontDoor, coordinator: str) -> None:
        self._door, self._coordinator = door, coordinator
        self._lock = threading.Lock()
        self._running: dict[str, RemoteDevice] = {}
        self._gone: dict[str, str] = {}
        self._dismissed: set[str] = set()
        self._names: list[str] = []
        self._listening = True

    def welcome(self, names: list[str]) -> None:
        """Take note of who has come."""
        self._names = names

    def __enter__(self) -> Self:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        words = self._words(error)
        self._listening = False
        with contextlib.suppress(PotluckError):  # the server has stopped, and whoever waited for it hears that
            for name in self._names:
                if name not in self._gone and name not in self._dismissed:
                    self._door.send(name, {"do": "end", "ok": error is None, "message": words})
            self._door.end(words)

    def device(self, name: str, spec: Mapping[str, Any]) -> "RemoteDevice":
        """A device that is about to run on the machine of this member."""
        return RemoteDevice(self, name, spec)

    def dismiss(self, name: str, why: str) -> None:
        """Let a member go that is not needed."""
        self._dismissed.add(name)
        self._door.send(name, {"do": "end", "ok": True, "message": why})

    def check(self) -> None:
        """See that everyone who is needed is still there.

        Raises:
            DeviceLost: somebody has left.
        """
        with self._lock:
            for name, why in self._gone.items():
                if name not in self._dismissed and name not in self._running:
                    raise DeviceLost(why)

    def attach(self, device: "RemoteDevice") -> None:
        """Start a device, and from now on hand it what its member says."""
        with self._lock:
            gone = self._gone.get(device.name)
            self._running[device.name] = device
        if gone is not None:
            device.say({"event": "error", "kind": "left", "message": gone})
            device.say(None)
            return
        self._door.send(device.name, {"do": "run", "spec": dict(device.spec)})

    def detach(self, device: "RemoteDevice") -> None:
        """Hand it nothing any more."""
        with self._lock:
            self._running.pop(device.name, None)

    def stop(self, name: str) -> None:
        """Ask a member to end its device."""
        if name not in self._gone:
            self._door.send(name, {"do": "stop"})

    def _listen(self) -> None:
        while self._listening:
            try:
                name, event = self._door.arrivals.get(timeout=0.2)
            except queue.Empty:
                continue
            with self._lock:
                device = self._running.get(name)
                if event is None:
                    self._gone.setdefault(name, f"{name} does not answer any more.")
                elif event.get("event") == "left":
                    self._gone[name] = from_outside(event.get("message") or f"{name} left.")
                gone = self._gone.get(name)
            if device is None or (event is not None and _of_another(event, device)):
                continue
            if event is None:
                device.say({"event": "error", "kind": "left", "message": f"{gone} The others were ended."})
                device.say(None)
            elif event.get("event") == "closed":
                device.say(None)
            elif (allowed := _allowed(event, device.spec.get("rank"))) is not None:
                device.say(allowed)

    def _words(self, error: BaseException | None) -> str:
        if error is None:
            return f"Training has ended; the result lies on {self._coordinator}."
        return in_words(error, self._coordinator)


def _allowed(event: Event, rank: object) -> Event | None:
    """What a member may tell of its own device; None for what it may not."""
    kind = event.get("event")
    if not isinstance(kind, str) or kind in _NOT_OF_MEMBERS:
        return None
    if kind == "error":
        event = {key: event[key] for key in ("event", "kind", "exit_code") if key in event} | {
            "message": from_outside(event.get("message", "an error without a message"))
        }
    return event | {"rank": rank}


class RemoteDevice:
    """One device of another machine in one generation."""

    def __init__(self, members: Members, name: str, spec: Mapping[str, Any]) -> None:
        self.name, self.spec = name, spec
        self._members = members
        self._arrivals: Arrivals | None = None
        self._closed = threading.Event()
        self._words = bytearray()

    def start(self, arrivals: Arrivals) -> None:
        """Have its member start it."""
        self._arrivals = arrivals
        self._members.attach(self)

    def say(self, event: Event | None) -> None:
        """Pass on what came from it."""
        if self._arrivals is None or self._closed.is_set():
            return
        if event is None:
            self._closed.set()
        self._arrivals.put((self, event))

    def remember(self, text: bytes) -> None:
        """Keep what was written for people."""
        self._words += text

    def last_words(self) -> str:
        """What was written for people; its member keeps the rest."""
        return self._words.decode(errors="replace").strip()

    def ending(self, finished: bool, grace_s: float) -> str | None:
        """How it ended; its member has said so before, unless it ended early without a reason."""
        return None if finished else "ended before its work was done"

    def crashed(self) -> bool:
        """Its member tells last words in its own message."""
        return False

    def ask_to_end(self) -> None:
        """Have its member end it."""
        if self._arrivals is not None and not self._closed.is_set():
            self._members.stop(self.name)

    def wait(self, timeout_s: float) -> bool:
        """Whether its member has said that it ended."""
        return self._arrivals is None or self._closed.wait(timeout_s)

    def end(self) -> None:
        """Listen to it no more."""
        self._members.detach(self)


def _of_another(event: Event, device: "RemoteDevice") -> bool:
    """Whether an event is of a generation before this device's, and only comes late."""
    return bool(event.get("generation", 0) != device.spec.get("generation", 0))
