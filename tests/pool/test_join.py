"""A machine in somebody else's pool, whose devices are small programs."""

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from control.doors import open_door
from pool.guests import Joining, pool, spec, until_closed, use_script
from pool.scripted import device, ended
from potluck.control.client import Client
from potluck.control.identity import Identity
from potluck.control.invite import Invite
from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.pool.join import Ended, Guest, join

WORKS = """
tell("loaded", pid=os.getpid(), train=spec["job"]["data"]["train"], told=spec)
if spec["task"] == "wait":
    time.sleep(60)
if spec["task"] == "refuse":
    tell("error", message="mine.jsonl:3 holds no answer.", exit_code=2)
    sys.exit(2)
if spec["task"] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if spec["task"] == "lose":
    tell("error", message="Another device ended.", kind="peer", exit_code=1)
    sys.exit(1)
tell("finished")
"""


@pytest.fixture(autouse=True)
def _scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    use_script(monkeypatch, device(tmp_path, WORKS))


def test_what_the_device_says_reaches_the_coordinator_until_the_end(tmp_path: Path) -> None:
    mine = tmp_path / "mine.jsonl"
    mine.write_text('{"text": "mine alone"}\n')
    with open_door(Identity.load(tmp_path / "identity")) as door:
        guest = Joining(door.invite.encode(), data=(str(mine),), threads=1)
        (member,) = door.wait_for_members(lambda member: None)
        assert (member.name, member.has_data, member.threads) == ("cam-1", True, 1)
        assert member.machine["cores"] >= 1
        for owns in (True, False):
            door.send("cam-1", {"do": "run", "spec": spec(task="work", owns=owns)})
            loaded, finished, closed = until_closed(door)
            assert loaded["train"] == ([str(mine)] if owns else ["-"])
            assert loaded["told"]["address"] == "127.0.0.1"
            assert Path(loaded["told"]["cache"]).name == door.invite.fingerprint.hex()[:16]
            assert (finished["event"], closed["event"]) == ("finished", "closed")
        door.send("cam-1", {"do": "end", "ok": True, "message": "Done."})
        assert guest.result() == Ended(True, "Done.")
        assert [event["event"] for event in guest.events] == ["loaded", "finished"] * 2


@pytest.mark.parametrize(
    ("task", "kind", "exit_code", "sentence"),
    [
        ("refuse", "own", 2, "cam-1: mine.jsonl:3 holds no answer."),
        ("die", "own", 1, "cam-1 was killed by signal 9 (SIGKILL); perhaps"),
        ("lose", "peer", 1, "cam-1: Another device ended."),
    ],
)
def test_what_goes_wrong_here_is_told_with_the_name(
    tmp_path: Path, task: str, kind: str, exit_code: int, sentence: str
) -> None:
    with open_door(Identity.load(tmp_path / "identity")) as door:
        guest = Joining(door.invite.encode())
        door.wait_for_members(lambda member: None)
        door.send("cam-1", {"do": "run", "spec": spec(task=task)})
        error = until_closed(door)[-2]
        assert (error["event"], error["kind"], error["exit_code"]) == ("error", kind, exit_code)
        assert error["message"].startswith(sentence)
        door.send("cam-1", {"do": "end", "ok": False, "message": "It ended."})
        assert guest.result() == Ended(False, "It ended.")


def test_what_names_a_file_of_this_machine_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    with open_door(Identity.load(tmp_path / "identity")) as door:
        guest = Joining(door.invite.encode())
        door.wait_for_members(lambda member: None)
        door.send("cam-1", {"do": "run", "spec": spec(result_dir=str(tmp_path))})
        error, closed = until_closed(door)
        assert (error["event"], error["exit_code"], closed["event"]) == ("error", 2, "closed")
        assert error["message"].startswith("cam-1: The coordinator asks for what a joined device does not do (result_")
        door.send("cam-1", {"do": "end", "message": "\x1b[2JIt ended."})
        assert guest.result() == Ended(False, "\ufffd[2JIt ended.")


def test_last_words_stay_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_script(monkeypatch, device(tmp_path, 'print("my own text", file=sys.stderr, flush=True); sys.exit(3)'))
    with open_door(Identity.load(tmp_path / "identity")) as door:
        guest = Joining(door.invite.encode())
        door.wait_for_members(lambda member: None)
        door.send("cam-1", {"do": "run", "spec": spec()})
        error, _ = until_closed(door)
        assert "ended with exit code 3" in error["message"]
        assert "my own text" not in json.dumps(error)
        door.send("cam-1", {"do": "end", "message": ""})
        guest.result()


def test_an_answer_that_makes_no_sense_ends_the_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(client: Client) -> None:
        raise KeyError("do")

    monkeypatch.setattr(Client, "next", no_answer)
    with open_door(Identity.load(tmp_path / "identity")) as door:
        error = Joining(door.invite.encode()).result()
    assert isinstance(error, PotluckError)
    assert "makes no sense (KeyError)" in str(error)


def test_a_stopped_device_ends_and_the_next_may_run(tmp_path: Path) -> None:
    with open_door(Identity.load(tmp_path / "identity")) as door:
        guest = Joining(door.invite.encode())
        door.wait_for_members(lambda member: None)
        door.send("cam-1", {"do": "stop"})  # nothing runs: nothing happens
        for _ in range(2):
            door.send("cam-1", {"do": "run", "spec": spec(task="wait")})
            _, loaded = door.arrivals.get(timeout=10)
            assert loaded is not None
            door.send("cam-1", {"do": "stop"})
            assert until_closed(door) == [{"event": "closed", "generation": 0}]
            assert ended([loaded["pid"]], within_s=1)
    result = guest.result()
    assert isinstance(result, Ended)
    assert not result.ok


def test_a_device_that_is_not_needed_while_it_runs_goes_home(tmp_path: Path) -> None:
    with open_door(Identity.load(tmp_path / "identity")) as door:
        guest = Joining(door.invite.encode())
        door.wait_for_members(lambda member: None)
        door.send("cam-1", {"do": "run", "spec": spec(task="wait")})
        _, loaded = door.arrivals.get(timeout=10)
        assert loaded is not None
        door.send("cam-1", {"do": "end", "ok": True, "message": "hub trains faster alone."})
        assert guest.result() == Ended(True, "hub trains faster alone.")
        assert ended([loaded["pid"]], within_s=1)


COORDINATOR = """
import sys, time
from pathlib import Path
from potluck.control.front_door import FrontDoor
from potluck.control.identity import Identity
with FrontDoor(Identity.load(Path(sys.argv[1])), "127.0.0.1", places=1, invite_s=60) as door:
    print(door.invite.encode(), flush=True)
    door.wait_for_members(lambda member: None)
    if sys.argv[2] != "-":
        door.send("cam-1", {"do": "run", "spec": __import__("json").loads(sys.argv[2])})
    while True:
        print(door.arrivals.get(timeout=60), flush=True)
"""


@pytest.mark.parametrize("running", [True, False])
def test_a_coordinator_that_was_killed_ends_the_stay_and_its_device(tmp_path: Path, running: bool) -> None:
    told = json.dumps(spec(task="wait")) if running else "-"
    argv = [sys.executable, "-c", COORDINATOR, str(tmp_path / "identity"), told]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as coordinator:
        assert coordinator.stdout is not None
        try:
            guest = Joining(coordinator.stdout.readline().strip())
            if running:
                assert "loaded" in coordinator.stdout.readline()
            else:
                time.sleep(0.3)
        finally:
            coordinator.kill()
        error = guest.result(within_s=6)
    assert isinstance(error, DeviceLost)
    assert "The coordinator at 127.0.0.1" in str(error)
    assert "does not answer" in str(error)
    assert ended([event["pid"] for event in guest.events], within_s=1)


@pytest.mark.parametrize(
    ("invite", "guest", "sentence"),
    [
        ("garbage", Guest(), "This is not an invite"),
        ("", Guest(), "This is not an invite"),
        ("potluck1.AAAA", Guest(), "mistyped or cut short"),
        ("potluck1.ä", Guest(), "mistyped or cut short"),
        ("potluck9.AAAA", Guest(), "another version"),
        ("garbage", Guest(name="a/b"), "--name 'a/b'"),
        ("garbage", Guest(name="x" * 65), "at most 64 letters"),
        ("garbage", Guest(name="two\nlines"), "--name"),
        ("garbage", Guest(pace=0.0), "above 0 and at most 1, not 0.0"),
        ("garbage", Guest(pace=float("nan")), "above 0 and at most 1, not nan"),
    ],
)
def test_what_cannot_be_used_is_refused_at_once(invite: str, guest: Guest, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        join(invite, guest)


def test_a_name_of_ordinary_words_is_none_of_the_odd_ones(tmp_path: Path) -> None:
    with open_door(Identity.load(tmp_path / "identity")) as door:
        guest = Joining(door.invite.encode(), name="Jörgs laptop (2)")
        (member,) = door.wait_for_members(lambda member: None)
        assert member.name == "Jörgs laptop (2)"
    guest.result()


def test_where_nothing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool(tmp_path) as (door, _):
        invite = Invite.decode(door.invite.encode())
    monkeypatch.setattr(Client, "join", functools.partial(Client.join, patience_s=0.3))
    with pytest.raises(DeviceLost, match=rf"The coordinator at 127\.0\.0\.1:{invite.port} does not answer"):
        join(invite.encode(), Guest(name="cam-1"))


def potluck(*arguments: str) -> list[str]:
    """The command line, which says at its end whether torch was imported."""
    code = (
        "import atexit, sys, potluck.cli\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'transformers' in sys.modules))\n"
        f"sys.argv = ['potluck', *{list(arguments)!r}]\n"
        "potluck.cli.main()\n"
    )
    return [sys.executable, "-c", code]


def test_the_parent_of_a_device_spends_no_memory_on_torch(tmp_path: Path) -> None:
    with open_door(Identity.load(tmp_path / "identity")) as door:
        process = subprocess.Popen(
            potluck("join", "-", "--name", "cam-1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(door.invite.encode() + "\n")
        process.stdin.close()
        process.stdin = None
        door.wait_for_members(lambda member: None)
        door.send("cam-1", {"do": "end", "ok": True, "message": "Not needed."})
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-2:] == ["Not needed.", "False False"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_who_is_interrupted_while_waiting_says_goodbye(tmp_path: Path, number: int, status: int) -> None:
    with open_door(Identity.load(tmp_path / "identity")) as door:
        argv = potluck("join", door.invite.encode(), "--name", "cam-1")
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert any("Waiting" in line for line in process.stdout)
            os.kill(process.pid, number)
            assert process.wait(timeout=10) == status
            assert process.stderr is not None
            assert "Traceback" not in process.stderr.read()
        assert door.arrivals.get(timeout=5) == ("cam-1", {"event": "left", "message": "cam-1 was interrupted."})
        assert door.arrivals.get(timeout=5) == ("cam-1", None)
