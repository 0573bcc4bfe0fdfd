"""This machine and those that joined it: who is told what, who stays, and who is to blame."""

import json
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from pool.guests import Joining, pool, use_script
from pool.scripted import device
from potluck.control.members import Member
from potluck.control.versions import versions
from potluck.errors import BadInput, DeviceLost
from potluck.job import Job
from potluck.pool.crew import Gathering, JoinedCrew, LocalCrew, Manners, check_gathering, joined_crew
from potluck.pool.join import Ended
from potluck.pool.launch import PeerLost
from potluck.pool.listener import Listener
from potluck.pool.local import stand_back, threads_of
from potluck.pool.members import Members
from potluck.pool.process import Event

ECHOES = """
tell("told", spec=spec)
if spec["task"] == "refuse" and rank == 1:
    tell("error", message="mine.jsonl:3 holds no answer.", exit_code=2)
    sys.exit(2)
if spec["task"] == "lose" and rank == 0:
    tell("error", message="Another device ended.", kind="peer", exit_code=1)
    sys.exit(1)
if spec["task"] != "work":
    time.sleep(60)
tell("finished")
"""


@pytest.fixture(autouse=True)
def _scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    use_script(monkeypatch, device(tmp_path, ECHOES))


def job(folder: Path, **differs: Any) -> Job:
    template = folder / "private.jinja"
    template.write_text("{{ messages }}")
    fields = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "a.jsonl"), "eval": str(folder / "b.jsonl"), "template": str(template)},
        "output": folder / "out",
        "overwrite": True,
        "threads": 1,
    }
    return Job.model_validate(fields | differs)


class Inviting(Listener):
    """Lets machines join as soon as there is an invite."""

    def __init__(self, **guests: dict[str, Any]) -> None:
        self.guests = guests
        self.joined: dict[str, Joining] = {}
        self.told: list[str] = []

    def tell(self, text: str) -> None:
        self.told.append(text)

    def invited(self, invite: str, peers: int, minutes: float) -> None:
        self.joined = {name: Joining(invite, name=name, **guest) for name, guest in self.guests.items()}


def here(peers: int) -> Gathering:
    return Gathering(peers, name="hub", address="127.0.0.1")


def test_members_are_told_the_work_and_nothing_of_this_machines_disk(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"text": "mine"}\n')
    inviting = Inviting(cam={"data": (str(mine),)})
    (tmp_path / "model").mkdir()
    wanted = job(tmp_path)
    with joined_crew(wanted, tmp_path / "model", here(1), Manners(), inviting) as crew:
        assert (crew.names, crew.owners) == (["hub", "cam"], [0, 1])
        events: list[Event] = []
        private = {"model_dir": str(tmp_path / "model"), "result_dir": str(tmp_path / "out")}
        crew.run("work", wanted, {"plan": {"strategy": "tensor"}, **private}, events.append)
    assert inviting.joined["cam"].result() == Ended(True, "Training has ended; the result lies on hub.")
    assert any("cam has joined from 127.0.0.1 (" in text and "brings data" in text for text in inviting.told)
    own, theirs = sorted((e["spec"] for e in events if e["event"] == "told"), key=lambda told: told["rank"])
    assert own["job"] == wanted.model_dump(mode="json")
    assert own["result_dir"] == private["result_dir"]
    assert theirs["plan"] == own["plan"] == {"strategy": "tensor"}
    assert theirs["job"]["data"].pop("train") == [str(mine)], "its own, put in by itself"
    del theirs["cache"]  # its own, too
    assert str(tmp_path) not in json.dumps(theirs)
    assert theirs["template"] == "{{ messages }}"
    assert theirs["generation"] == own["generation"] == 1


def test_who_is_left_out_goes_home_in_peace_and_the_others_move_up(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"text": "mine"}\n')
    inviting = Inviting(**{name: {"data": (str(mine),)} for name in "abc"})
    with joined_crew(job(tmp_path), tmp_path, here(3), Manners(), inviting) as crew:
        crew.owners = [0, 3]
        last = crew.names[3]
        out = crew.names[1]
        crew.keep([0, 2, 3], "hub trains faster without this device.")
        assert inviting.joined[out].result() == Ended(True, "hub trains faster without this device.")
        assert crew.names[2] == last
        assert crew.owners == [0, 2]
        events: list[Event] = []
        crew.run("work", job(tmp_path), {}, events.append)
        assert sorted(e["spec"]["rank"] for e in events if e["event"] == "told") == [0, 1, 2]


def test_what_a_member_refuses_names_it_and_is_bad_input(tmp_path: Path) -> None:
    inviting = Inviting(cam={})
    with (
        pytest.raises(BadInput, match=r"^cam: mine\.jsonl:3 holds no answer\."),
        joined_crew(job(tmp_path), tmp_path, here(1), Manners(), inviting) as crew,
    ):
        crew.run("refuse", job(tmp_path), {}, lambda event: None)
    assert inviting.joined["cam"].result() == Ended(False, "cam: mine.jsonl:3 holds no answer.")


def test_a_member_that_vanished_is_named_where_the_others_lost_a_peer(tmp_path: Path) -> None:
    described = {"address": "127.0.0.1", "versions": versions(), "has_data": False, "threads": 1, "machine": {}}
    with pool(tmp_path, "cam-1", "cam-2") as (door, (alive, _)), Members(door, "hub") as members:
        joined = [Member(name=name, **described) for name in ("cam-1", "cam-2")]  # type: ignore[arg-type]
        crew = JoinedCrew(door, members, joined, "hub", {"threads": 1})

        def body() -> None:
            while (instruction := alive.next()) is None or instruction["do"] != "stop":
                pass
            alive.post([{"event": "closed", "generation": 1}])

        thread = threading.Thread(target=body)
        thread.start()
        with pytest.raises(DeviceLost, match=r"^cam-2 broke the connection and does not answer any more\.") as caught:
            crew.run("lose", job(tmp_path), {}, lambda event: None)
        assert isinstance(caught.value.__cause__, PeerLost)
        thread.join()


@pytest.mark.parametrize(
    ("gathering", "differs", "sentence"),
    [
        (Gathering(0), {}, "--peers 0: a pool has 1 to 63"),
        (Gathering(64), {}, "--peers 64: a pool has 1 to 63"),
        (Gathering(1), {"strategy": "single"}, "leave out --peers 1"),
        (Gathering(2), {"devices": "2"}, "give 3 shares"),
        (Gathering(2), {"devices": "2:1"}, "does not fit --peers 2"),
        (Gathering(2), {"devices": "many"}, "neither a number of devices"),
        (Gathering(1, name="a/b"), {}, "--name 'a/b'"),
        (Gathering(1, name=" "), {}, "--name ' '"),
    ],
    ids=str,
)
def test_gatherings_that_cannot_be(
    tmp_path: Path, gathering: Gathering, differs: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(BadInput, match=sentence):
        check_gathering(job(tmp_path, **differs), gathering)


@pytest.mark.parametrize("devices", ["1", "3", "3:2:1"])
def test_gatherings_that_can(tmp_path: Path, devices: str) -> None:
    check_gathering(job(tmp_path, devices=devices), Gathering(2, name="Jörgs laptop (2)"))


def test_an_address_or_a_port_that_is_not_free(tmp_path: Path) -> None:
    def gather(**differs: Any) -> None:
        with joined_crew(job(tmp_path), tmp_path, Gathering(1, **differs), Manners(), Listener()):
            pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(BadInput, match=rf"127\.0\.0\.1 port {port} cannot be listened on: Address already in use"):
            gather(address="127.0.0.1", port=port)
    with pytest.raises(BadInput, match=r"--address 192\.0\.2\.7 is no address of this machine, which has"):
        gather(address="192.0.2.7")
    with pytest.raises(BadInput, match="'here' is no IPv4 or IPv6 address"):
        gather(address="here")


@pytest.mark.parametrize("pace", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_a_pace_that_no_device_has(pace: float) -> None:
    with pytest.raises(BadInput, match="a paced device has a speed above 0 and at most 1"):
        Manners(pace=pace)


def test_local_devices_are_polite(tmp_path: Path) -> None:
    events: list[Event] = []
    LocalCrew(2, 0, Manners(nice=True)).run("work", job(tmp_path), {}, events.append)
    told = [event["spec"] for event in events if event["event"] == "told"]
    assert [(spec["nice"], spec["threads"]) for spec in told] == [(True, threads_of(0, devices=2, nice=True))] * 2


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.pool.local.usable_cores", lambda: 8)
    assert threads_of(0) == 8
    assert threads_of(0, devices=3) == 2
    assert threads_of(0, devices=20) == 1
    assert threads_of(6) == 6
    assert threads_of(0, nice=True) == threads_of(6, nice=True) == 4
    assert threads_of(3, nice=True) == 3
    assert threads_of(3, devices=2, nice=True) == 2
    assert threads_of(6, paced=True) == 1


def test_to_stand_back_twice_is_as_good_as_once() -> None:
    child = os.fork()
    if child == 0:
        stand_back()
        once = os.nice(0)
        stand_back()
        os._exit(0 if once == os.nice(0) >= 10 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
