"""Coordinators and the machines that joined them, in one process: real front doors, real clients."""

import functools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from control.doors import join as join_bare
from control.doors import open_door
from potluck.control.client import Client
from potluck.control.front_door import FrontDoor
from potluck.control.identity import Identity
from potluck.pool import crew, join
from potluck.pool.join import Ended, Guest
from potluck.pool.launch import run_devices
from potluck.pool.process import Event

JOB = {"model": "-", "data": {"train": ["-"]}, "output": "-"}


@contextmanager
def pool(folder: Path, *names: str, **options: Any) -> Iterator[tuple[FrontDoor, list[Client]]]:
    """A front door and members of which the test speaks each word."""
    with open_door(Identity.load(folder / "identity"), places=len(names), **options) as door:
        yield door, [join_bare(door.invite, name) for name in names]


def spec(name: str = "cam-1", **fields: Any) -> dict[str, Any]:
    device = {"task": "train", "name": name, "rank": 1, "names": ["hub", name], "world_size": 2}
    return {**device, "owns": False, "job": JOB, **fields}


def use_script(monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    """Devices are this program, and nobody is patient."""
    scripted = functools.partial(run_devices, command=command, settle_s=0.3, grace_s=1.0)
    monkeypatch.setattr(join, "run_devices", scripted)
    monkeypatch.setattr(crew, "run_devices", scripted)
    monkeypatch.setattr(Client, "join", functools.partial(Client.join, patience_s=1.0))


class Joining:
    """A machine that joins, in a thread."""

    def __init__(self, invite: str, **guest: Any) -> None:
        self.ended: Ended | BaseException | None = None
        self.events: list[Event] = []
        self._thread = threading.Thread(target=self._join, args=(invite, Guest(**{"name": "cam-1", **guest})))
        self._thread.start()

    def _join(self, invite: str, guest: Guest) -> None:
        try:
            self.ended = join.join(invite, guest, on_event=self.events.append)
        except BaseException as error:
            self.ended = error

    def result(self, within_s: float = 10.0) -> Ended | BaseException | None:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), "it has not ended"
        return self.ended


def until_closed(door: FrontDoor) -> list[Event]:
    """What a member says of its device, up to its end."""
    events: list[Event] = []
    deadline = time.monotonic() + 10
    while not events or events[-1]["event"] != "closed":
        _, event = door.arrivals.get(timeout=max(0.1, deadline - time.monotonic()))
        assert event is not None, "it is gone"
        events.append(event)
    return events
