"""Devices of other machines as the coordinator sees them; the members are the test's own words."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pool.guests import pool, spec
from potluck.control.client import Client
from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.pool.launch import PeerLost, run_devices
from potluck.pool.members import Members
from potluck.pool.process import Event

CLOSED = {"event": "closed"}


def answering(client: Client, *events: Event) -> threading.Thread:
    """Tell events as soon as there is something to do."""

    def body() -> None:
        while client.next() is None:
            pass
        client.post(events)

    thread = threading.Thread(target=body)
    thread.start()
    return thread


def run(members: Members, *names: str, on_event: Callable[[Event], None] = lambda event: None, **options: Any) -> None:
    devices = [members.device(name, spec(name)) for name in names]
    run_devices([], on_event, remote=devices, **{"settle_s": 0.3, "grace_s": 0.3, "check": members.check, **options})


def test_events_of_two_generations(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1", "cam-2") as (door, clients), Members(door, "hub") as members:
        members.welcome(["cam-1", "cam-2"])
        for generation in range(2):
            said: list[Event] = []
            own = [{"event": "fetching", "done": 10 * generation + i} for i in range(3)]
            threads = [answering(client, *own, {"event": "finished"}, CLOSED) for client in clients]
            run(members, "cam-1", "cam-2", on_event=said.append)
            for thread in threads:
                thread.join()
            assert sorted(event["done"] for event in said if event["event"] == "fetching") == sorted(
                event["done"] for event in own * 2
            )


def test_a_member_speaks_for_its_own_device_alone(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1") as (door, (client,)), Members(door, "hub") as members:
        members.welcome(["cam-1"])
        said: list[Event] = []
        forged = [{"event": kind, "rank": 0} for kind in ("begin", "step", "ran_out", "saving", "saved")]
        thread = answering(client, *forged, {"rank": 0}, {"event": 7}, {"event": "finished", "rank": 0}, CLOSED)
        run(members, "cam-1", on_event=said.append)
        thread.join()
        assert said == [{"event": "finished", "rank": 1}]


def test_what_a_member_says_cannot_steer_a_terminal(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1") as (door, (client,)), Members(door, "hub") as members:
        error = {"event": "error", "kind": "own", "message": "cam-1: \x1b]0;title\x07\x1b[2J!", "traceback": "\x1b[2J"}
        thread = answering(client, error, CLOSED)
        with pytest.raises(PotluckError, match=r"^cam-1: [^\x00-\x1f]*!$") as caught:
            run(members, "cam-1")
        thread.join()
        assert not getattr(caught.value, "__notes__", [])


def test_a_server_that_stopped_hides_no_error(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1") as (door, _):
        members = Members(door, "hub")
        members.welcome(["cam-1"])
        door.__exit__(None, None, None)
        with pytest.raises(ZeroDivisionError), members:
            raise ZeroDivisionError


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [
        ({"kind": "own", "exit_code": 2, "message": "cam-1: mine.jsonl:3 is empty."}, BadInput, "cam-1: mine.jsonl:3"),
        ({"kind": "own", "exit_code": 1, "message": "cam-1 was killed by signal 9."}, PotluckError, "^cam-1 was kil"),
        ({"kind": "peer", "exit_code": 1, "message": "Another device ended."}, PeerLost, "^cam-1: Another device"),
    ],
)
def test_what_a_member_reports_ends_the_run(
    tmp_path: Path, said: Event, kind: type[PotluckError], sentence: str
) -> None:
    with pool(tmp_path, "cam-1", "cam-2") as (door, (first, second)), Members(door, "hub") as members:
        threads = [answering(first, {"event": "error", **said}, CLOSED)]
        with pytest.raises(kind, match=sentence) as caught:
            run(members, "cam-1", "cam-2")
        assert type(caught.value) is kind
        threads[0].join()
        assert [second.next(), second.next()] == [{"do": "run", "spec": spec("cam-2")}, {"do": "stop"}]


def test_the_cause_is_told_and_not_the_lost_peer(tmp_path: Path) -> None:
    lost = {"event": "error", "kind": "peer", "exit_code": 1, "message": "Another device ended."}
    killed = {"event": "error", "kind": "own", "exit_code": 1, "message": "cam-2 was killed by signal 9."}
    with pool(tmp_path, "cam-1", "cam-2") as (door, (first, second)), Members(door, "hub") as members:
        threads = [answering(first, lost, CLOSED), answering(second, killed, CLOSED)]
        with pytest.raises(PotluckError, match=r"^cam-2 was killed by signal 9\.$"):
            run(members, "cam-1", "cam-2")
        for thread in threads:
            thread.join()


def test_a_member_that_leaves_says_why_to_all(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1") as (door, (client,)), Members(door, "hub") as members:
        threading.Timer(0.2, client.leave, ["cam-1 was interrupted."]).start()
        with pytest.raises(DeviceLost, match=r"cam-1 was interrupted\. The others were ended\."):
            run(members, "cam-1")
        with pytest.raises(DeviceLost, match=r"^cam-1 was interrupted\.$"):
            run(members, "cam-1")  # it is gone, also for the next task
        with pytest.raises(DeviceLost, match=r"^cam-1 was interrupted\.$"):
            members.check()


@pytest.mark.timing
def test_a_silent_member_is_missed(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1", silent_s=0.6) as (door, _), Members(door, "hub") as members:
        began = time.monotonic()
        with pytest.raises(DeviceLost, match=r"cam-1 does not answer any more\."):
            run(members, "cam-1")
        assert time.monotonic() - began < 3


def test_who_is_dismissed_may_leave(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1", "cam-2") as (door, (first, second)):
        with Members(door, "hub") as members:
            members.welcome(["cam-1", "cam-2"])
            members.dismiss("cam-2", "hub trains faster without this device.")
            assert second.next() == {"do": "end", "ok": True, "message": "hub trains faster without this device."}
            second.leave("")
            thread = answering(first, {"event": "finished"}, CLOSED)
            run(members, "cam-1")
            thread.join()
            members.check()
        assert first.next() == {"do": "end", "ok": True, "message": "Training has ended; the result lies on hub."}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (BadInput("data.jsonl is empty."), "data.jsonl is empty."),
        (KeyboardInterrupt(), "hub was interrupted."),
        (SystemExit(143), "hub was interrupted."),
        (ZeroDivisionError("private words"), "hub failed (ZeroDivisionError)."),
    ],
)
def test_members_are_told_how_it_ended(tmp_path: Path, error: BaseException, message: str) -> None:
    with pool(tmp_path, "cam-1") as (door, (client,)):
        members = Members(door, "hub")
        members.welcome(["cam-1"])
        with pytest.raises(type(error)), members:
            raise error
        assert client.next() == {"do": "end", "ok": False, "message": message}


@pytest.mark.timing
def test_an_interrupt_stops_the_members_device_and_waits_for_its_end(tmp_path: Path) -> None:
    with pool(tmp_path, "cam-1") as (door, (client,)), Members(door, "hub") as members:
        told: list[Any] = []

        def body() -> None:
            while len(told) < 2:
                if instruction := client.next():
                    told.append(instruction["do"])
            time.sleep(0.2)
            client.post([CLOSED])

        def interrupt() -> None:
            if told:
                raise KeyboardInterrupt

        thread = threading.Thread(target=body)
        thread.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            run(members, "cam-1", check=interrupt, grace_s=5.0)
        assert 0.2 < time.monotonic() - began < 3
        thread.join()
        assert told == ["run", "stop"]
