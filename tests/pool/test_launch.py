"""Real processes: small programs that speak the devices' language."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pool.scripted import alive, device, ended
from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.pool.launch import Event, run_devices


def specs(count: int, **fields: object) -> list[dict[str, object]]:
    return [{"rank": rank, "name": f"device-{rank}", **fields} for rank in range(count)]


def test_every_event_arrives_in_the_order_of_its_device(tmp_path: Path) -> None:
    command = device(
        tmp_path,
        """
        print("a library's greeting", flush=True)
        for step in range(20):
            tell("step", step=step, told=spec["told"])
        tell("finished")
        """,
    )
    events: list[Event] = []
    run_devices(specs(3, told="x" * 10_000), events.append, command=command)
    for rank in range(3):
        own = [event for event in events if event["rank"] == rank]
        assert [event.get("step") for event in own] == [*range(20), None]
        assert own[-1]["event"] == "finished"
        assert own[0]["told"] == "x" * 10_000


@pytest.mark.timing
def test_what_a_device_refuses_is_bad_input_and_ends_the_others(tmp_path: Path) -> None:
    command = device(
        tmp_path,
        """
        tell("loaded", pid=os.getpid())
        if rank == 1:
            time.sleep(0.2)
            tell("error", message="data.jsonl:3 holds no answer.", exit_code=2, traceback="Traceback: there")
            sys.exit(2)
        time.sleep(60)
        """,
    )
    events: list[Event] = []
    began = time.monotonic()
    with pytest.raises(BadInput, match=r"^data\.jsonl:3 holds no answer\.") as caught:
        run_devices(specs(3), events.append, command=command)
    assert time.monotonic() - began < 10
    assert str(caught.value) == "data.jsonl:3 holds no answer."
    assert "Traceback: there" in caught.value.__notes__[0]
    assert ended([event["pid"] for event in events], within_s=1)


def test_the_cause_is_told_and_not_its_consequence(tmp_path: Path) -> None:
    command = device(
        tmp_path,
        """
        if rank == 0:
            tell("error", message="device-0 lost its peer.", exit_code=1, kind="peer", traceback="")
            sys.exit(1)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
        """,
    )
    with pytest.raises(DeviceLost, match=r"device-1 was killed by signal 9 \(SIGKILL\); perhaps .* out of memory"):
        run_devices(specs(2), lambda event: None, command=command)


@pytest.mark.timing
def test_a_lost_peer_alone_is_still_an_error(tmp_path: Path) -> None:
    command = device(
        tmp_path,
        """
        if rank == 1:
            tell("error", message="the connection to device-0 broke.", exit_code=1, kind="peer")
            sys.exit(1)
        while True:
            tell("step")
            time.sleep(0.01)
        """,
    )
    began = time.monotonic()
    with pytest.raises(PotluckError, match=r"device-1: the connection to device-0 broke\."):
        run_devices(specs(2), lambda event: None, command=command, settle_s=0.3)
    assert time.monotonic() - began < 5, "a chatty survivor must not put off the end"


def test_last_words_of_a_device_that_crashed(tmp_path: Path) -> None:
    command = device(tmp_path, "print('noise' * 50_000, file=sys.stderr)\nraise RuntimeError('out of luck')\n")
    with pytest.raises(DeviceLost, match="device-0 ended with exit code 1") as caught:
        run_devices(specs(1), lambda event: None, command=command, settle_s=0.1)
    assert str(caught.value).endswith("RuntimeError: out of luck")
    assert len(str(caught.value)) < 5_000


def test_leaving_quietly_before_the_end_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceLost, match="device-0 ended with exit code 0"):
        run_devices(specs(1), lambda event: None, command=device(tmp_path, "sys.exit(0)"), settle_s=0.1)


@pytest.mark.timing
def test_a_device_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    command = device(
        tmp_path,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        tell("loaded", pid=os.getpid())
        if rank == 1:
            time.sleep(0.3)
            os._exit(3)
        time.sleep(60)
        """,
    )
    events: list[Event] = []
    began = time.monotonic()
    with pytest.raises(DeviceLost, match="device-1"):
        run_devices(specs(2), events.append, command=command, settle_s=0.1, grace_s=0.3)
    assert time.monotonic() - began < 5
    assert ended([event["pid"] for event in events], within_s=1)


def test_an_error_of_the_listener_ends_every_device(tmp_path: Path) -> None:
    pids: list[int] = []

    def on_event(event: Event) -> None:
        pids.append(event["pid"])
        if len(pids) == 2:
            raise OSError("disk full")

    command = device(tmp_path, "tell('loaded', pid=os.getpid())\ntime.sleep(60)")
    with pytest.raises(OSError, match="disk full"):
        run_devices(specs(2), on_event, command=command)
    assert ended(pids, within_s=1)


@pytest.mark.timing
def test_ctrl_c_reaches_the_parent_which_ends_every_device(tmp_path: Path) -> None:
    command = device(tmp_path, "tell('loaded', pid=os.getpid(), session=os.getsid(0))\ntime.sleep(60)")
    events: list[Event] = []

    def on_event(event: Event) -> None:
        events.append(event)
        if len(events) == 3:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_devices(specs(3), on_event, command=command)
    assert time.monotonic() - began < 5
    assert ended([event["pid"] for event in events], within_s=1)
    assert len({event["session"] for event in events} | {os.getsid(0)}) == 4


def test_a_parent_killed_outright_leaves_no_orphan(tmp_path: Path) -> None:
    command = device(tmp_path, "tell('loaded', pid=os.getpid())\ntime.sleep(60)")
    parent = tmp_path / "parent.py"
    parent.write_text(
        "from potluck.pool.launch import run_devices\n"
        f"run_devices({specs(2)!r}, lambda event: print(event['pid'], flush=True), command={command!r})\n"
    )
    with subprocess.Popen([sys.executable, str(parent)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pids = [int(process.stdout.readline()) for _ in range(2)]
        assert all(alive(pid) for pid in pids)
        process.kill()
        process.wait()
    assert ended(pids, within_s=5)
