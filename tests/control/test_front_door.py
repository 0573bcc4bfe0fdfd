"""Real sockets and real TLS; members are threads of this process."""

import os
import threading
import time
from typing import Any

import httpx
import psutil
import pytest
from doors import LOCAL, join, open_door, raw

from potluck.control.client import Client
from potluck.control.front_door import FrontDoor
from potluck.control.identity import Identity
from potluck.control.members import Member
from potluck.control.versions import versions
from potluck.errors import BadInput, DeviceLost


def drained(door: FrontDoor, count: int) -> list[tuple[str, dict[str, Any] | None]]:
    return [door.arrivals.get(timeout=5) for _ in range(count)]


def test_a_member_joins_works_and_leaves(identity: Identity) -> None:
    with open_door(identity, places=2) as door:
        joined: list[Member] = []
        first = join(door.invite, "cam-1", has_data=True, threads=3, machine={"memory_mib": 512})
        second = join(door.invite, "cam-2")
        members = door.wait_for_members(joined.append)
        assert members == joined
        assert [(m.name, m.address, m.has_data, m.threads) for m in members] == [
            ("cam-1", LOCAL, True, 3),
            ("cam-2", LOCAL, False, 1),
        ]
        assert members[0].machine == {"memory_mib": 512}
        for i in range(3):
            door.send("cam-1", {"do": "count", "to": i})
        door.send("cam-2", {"do": "other"})
        assert [first.next() for _ in range(3)] == [{"do": "count", "to": i} for i in range(3)]
        assert second.next() == {"do": "other"}
        first.post([{"event": "a"}, {"event": "b", "value": 1.5}])
        first.post([{"event": "c"}])
        first.leave("Somebody pressed Ctrl-C.")
        assert drained(door, 5) == [
            ("cam-1", {"event": "a"}),
            ("cam-1", {"event": "b", "value": 1.5}),
            ("cam-1", {"event": "c"}),
            ("cam-1", {"event": "left", "message": "Somebody pressed Ctrl-C."}),
            ("cam-1", None),
        ]
        door.send("cam-1", {"do": "more"})
        with pytest.raises(BadInput, match="does not know this device"):
            first.next()
        first.leave("twice is no fault")
        assert door.arrivals.empty()


@pytest.mark.timing
def test_an_instruction_wakes_the_poll_and_waiting_is_quiet(identity: Identity) -> None:
    with open_door(identity, silent_s=1.0) as door, join(door.invite) as member:
        start = time.monotonic()
        assert member.next() is None
        assert 0.2 < time.monotonic() - start < 1.0
        threading.Timer(0.1, lambda: door.send("cam-1", {"do": "wake"})).start()
        start = time.monotonic()
        assert member.next() == {"do": "wake"}
        assert time.monotonic() - start < 0.3


def test_a_place_is_free_again_when_a_member_leaves_early(identity: Identity) -> None:
    with open_door(identity, places=2) as door:
        first = join(door.invite, "cam-1")
        first.post([{"event": "early"}])
        first.leave("The battery is low.")
        again = join(door.invite, "cam-1")
        again.post([{"event": "ready"}])
        assert door.arrivals.empty()
        join(door.invite, "cam-2")
        joined: list[str] = []
        left: list[tuple[str, str]] = []
        members = door.wait_for_members(
            lambda member: joined.append(member.name), lambda name, reason: left.append((name, reason))
        )
        assert joined == ["cam-1", "cam-1", "cam-2"]
        assert left == [("cam-1", "The battery is low.")]
        assert [member.name for member in members] == ["cam-1", "cam-2"]
        assert drained(door, 1) == [("cam-1", {"event": "ready"})]


@pytest.mark.timing
def test_a_silent_member_is_given_up_and_a_polling_one_is_not(identity: Identity) -> None:
    with open_door(identity, places=2, silent_s=0.6) as door:
        silent, alive = join(door.invite, "silent"), join(door.invite, "alive")
        door.wait_for_members(lambda _: None)
        start = time.monotonic()
        while time.monotonic() - start < 1.2:
            alive.next()
        assert door.arrivals.get_nowait() == ("silent", None)
        assert door.arrivals.empty()
        with pytest.raises(BadInput, match="no longer: join again"):
            silent.post([{"event": "late"}])


def test_events_arrive_once_when_answers_are_lost(identity: Identity) -> None:
    with open_door(identity) as door, join(door.invite) as member:
        send = member._http.request
        lost = iter([True, False, True, True, False])

        def lossy(*arguments: Any, **options: Any) -> httpx.Response:
            response = send(*arguments, **options)
            if next(lost, False):
                raise httpx.ReadError("the answer was lost")
            return response

        member._http.request = lossy  # type: ignore[method-assign]
        member.post([{"event": 1}, {"event": 2}])
        member.post([{"event": 3}])
        member.post([{"event": 4}])
        assert drained(door, 4) == [("cam-1", {"event": i}) for i in (1, 2, 3, 4)]
        assert door.arrivals.empty()


def test_instructions_come_once_when_answers_are_lost(identity: Identity) -> None:
    with open_door(identity) as door, join(door.invite) as member:
        send, lost = member._http.request, iter([True, True])

        def lossy(*arguments: Any, **options: Any) -> httpx.Response:
            response = send(*arguments, **options)
            if next(lost, False):
                raise httpx.ReadError("the answer was lost")
            return response

        member._http.request = lossy  # type: ignore[method-assign]
        door.send("cam-1", {"do": 1})
        door.send("cam-1", {"do": 2})
        assert [member.next(), member.next()] == [{"do": 1}, {"do": 2}]


def test_joining_again_after_a_lost_answer_is_the_same_joining(identity: Identity) -> None:
    with open_door(identity) as door, raw(door, headers={"Authorization": f"Bearer {door.invite.secret}"}) as http:
        told = {"name": "a", "address": LOCAL, "has_data": False, "threads": 1, "machine": {}}
        body = {"attempt": "b" * 32, "member": {**told, "versions": versions()}}
        tokens = [http.post("/join", json=body).json()["token"] for _ in range(2)]
        assert tokens[0] == tokens[1]
        assert http.post("/join", json={**body, "attempt": "c" * 32}).status_code == 409


def test_the_end_reaches_every_member(identity: Identity) -> None:
    heard: list[dict[str, Any] | None] = []

    def obey(member: Client) -> None:
        while (instruction := member.next()) is None:
            pass
        heard.append(instruction)

    with open_door(identity, places=2) as door:
        threads = [threading.Thread(target=obey, args=(join(door.invite, name),)) for name in ("a", "b")]
        for thread in threads:
            thread.start()
        door.end("hub was interrupted.")
        with pytest.raises(BadInput, match="hub was interrupted"):
            join(door.invite, "c")
    for thread in threads:
        thread.join(timeout=5)
    assert heard == [{"do": "end", "message": "hub was interrupted."}] * 2


@pytest.mark.timing
def test_leaving_the_block_ends_members_and_does_not_wait_for_the_dead(identity: Identity) -> None:
    with open_door(identity, places=2, grace_s=0.5) as door:
        alive, _dead = join(door.invite, "alive"), join(door.invite, "dead")
        heard: list[Any] = []
        thread = threading.Thread(target=lambda: heard.append(alive.next()))
        thread.start()
        time.sleep(0.05)
        start = time.monotonic()
    assert 0.4 < time.monotonic() - start < 3
    thread.join(timeout=5)
    assert heard[0]["do"] == "end"
    with pytest.raises(DeviceLost, match=rf"{door.invite.host}:{door.invite.port} does not answer"):
        alive.next()
    start = time.monotonic()
    alive.leave("The coordinator is gone, so nobody hears this.")
    assert time.monotonic() - start < 0.5


def test_it_listens_on_its_address_only(identity: Identity) -> None:
    with open_door(identity) as door:
        mine = psutil.Process().net_connections(kind="inet")
        listening = [c.laddr for c in mine if c.status == psutil.CONN_LISTEN and c.laddr.port == door.invite.port]
        assert [each.ip for each in listening] == [LOCAL]
        with pytest.raises(BadInput, match=f"127.0.0.1 port {door.invite.port} cannot be listened on"):
            FrontDoor(identity, LOCAL, port=door.invite.port, places=1, invite_s=1)
    with pytest.raises(BadInput, match=r"203\.0\.113\.9 port any cannot be listened on"):
        FrontDoor(identity, "203.0.113.9", places=1, invite_s=1)


def test_ipv6(identity: Identity) -> None:
    if not any(each.address == "::1" for each in psutil.net_if_addrs().get("lo", [])):
        pytest.skip("this machine has no ::1")
    with open_door(identity, address="::1") as door, join(door.invite, address="::1") as member:
        door.send("cam-1", {"do": "go"})
        assert member.next() == {"do": "go"}
        mine = psutil.Process().net_connections(kind="inet")
        assert [c.laddr.ip for c in mine if c.status == psutil.CONN_LISTEN and c.laddr.port == door.invite.port] == [
            "::1"
        ]


@pytest.mark.timing
def test_waiting_can_be_interrupted(identity: Identity) -> None:
    with open_door(identity) as door:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), 2)).start()
        start = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            door.wait_for_members(lambda _: None)
        assert time.monotonic() - start < 1.5
