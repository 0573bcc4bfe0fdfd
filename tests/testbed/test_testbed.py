"""Testbeds that are really set up; they need root."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from potluck import testbed
from potluck.errors import BadInput, PotluckError
from potluck.testbed import Testbed, TestDevice, calibrate, cgroup, down, network, read, up
from potluck.testbed.run import Ended, Stream
from potluck.testbed.state import FOLDERS_DIRECTORY, state_file

pytestmark = [pytest.mark.root, pytest.mark.alone]

_NAMES = ["hub", "cam-1", "cam-2"]
_RECEIVER = """
import socket, time
server = socket.create_server(("0.0.0.0", 5555))
print("ready", flush=True)
connection, _ = server.accept()
size, start = len(connection.recv(1 << 20)), time.perf_counter()
while received := len(connection.recv(1 << 20)):
    size += received
print(size * 8 / (time.perf_counter() - start))
"""
_SENDER = """
import socket, time
connection = socket.create_connection(("hub", 5555))
end = time.perf_counter() + 1.5
while time.perf_counter() < end:
    connection.sendall(bytes(1 << 16))
"""


def run_all(bed: Testbed, argv: list[str], *names: str) -> tuple[int, dict[str, list[str]], dict[str, Ended]]:
    lines: dict[str, list[str]] = {device.name: [] for device in bed.devices}
    ends: dict[str, Ended] = {}

    def on_line(device: TestDevice, stream: Stream, line: str) -> None:
        lines[device.name].append(line)

    def on_end(ended: Ended) -> None:
        ends[ended.device.name] = ended

    status = testbed.run(bed, argv, on_line, on_end, devices=bed.chosen(list(names)))
    return status, lines, ends


def python(bed: Testbed, device: int, program: str) -> "subprocess.Popen[str]":
    command = bed.devices[device].command([sys.executable, "-c", program])
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_behind(prefix: str) -> list[object]:
    folders = FOLDERS_DIRECTORY / prefix
    files = [path for path in (state_file(prefix), folders) if path.exists()]
    return [*network.found(prefix), *cgroup.found(prefix), *files]


def alive(marker: str) -> bool:
    """Whether some process of the machine has the marker among its arguments."""
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                if marker.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                    return True
    return False


def test_up_run_down(prefix: str) -> None:
    made = up([1.42, 1, 1], 10**9, names=_NAMES, prefix=prefix)
    assert read(prefix) == made
    assert state_file(prefix).stat().st_mode & 0o777 == 0o600
    assert sum(device.speed for device in made.devices) <= 0.9 * len(os.sched_getaffinity(0)) + 1e-9
    status, lines, _ = run_all(made, ["sh", "-c", "echo {name} {rank}/{world_size} {speed} {address} {x}; hostname"])
    assert status == 0
    for rank, device in enumerate(made.devices):
        words = f"{device.name} {rank}/3 {device.speed:g} {device.address} {{x}}"
        assert lines[device.name] == [words, device.name]
    assert down(prefix)
    assert left_behind(prefix) == []
    assert not down(prefix)
    with pytest.raises(BadInput, match="No testbed is up"):
        read(prefix)


def test_second_up_is_refused_and_the_first_unharmed(prefix: str) -> None:
    made = up([1, 1], 10**9, prefix=prefix)
    with pytest.raises(BadInput, match="is up already"):
        up([1], 10**9, prefix=prefix)
    assert run_all(made, ["true"])[0] == 0


def test_exit_status_and_choice_of_devices(prefix: str) -> None:
    made = up([1, 1, 1], 10**9, names=_NAMES, prefix=prefix)
    status, _, ends = run_all(made, ["sh", "-c", "sleep 0.{rank}; exit {rank}"])
    assert status == 1  # hub ends with 0, then cam-1 with 1, then cam-2 with 2
    assert [ends[name].returncode for name in _NAMES] == [0, 1, 2]
    status, lines, ends = run_all(made, ["sh", "-c", "echo here; kill -TERM $$"], "cam-2")
    assert (status, ends["cam-2"].returncode) == (128 + signal.SIGTERM, -signal.SIGTERM)
    assert lines == {"hub": [], "cam-1": [], "cam-2": ["here"]}
    status, lines, _ = run_all(made, ["no-such-program"], "hub")
    assert status == 127
    assert "no-such-program cannot be run" in lines["hub"][0]
    with pytest.raises(BadInput, match="no 'cam-9'"):
        made.chosen(["cam-9"])


@pytest.mark.timing
def test_link_has_its_rate(prefix: str) -> None:
    made = up([1, 1], 10**8, names=["hub", "cam"], prefix=prefix)
    receiver = python(made, 0, _RECEIVER)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "ready\n"
    sender = python(made, 1, _SENDER)
    sent, _ = sender.communicate(timeout=30)
    assert sender.returncode == 0, sent
    received, _ = receiver.communicate(timeout=30)
    assert float(received) == pytest.approx(10**8, rel=0.15)


def test_devices_reach_each_other_and_nothing_else(prefix: str) -> None:
    made = up([1, 1], 10**9, prefix=prefix)
    program = (
        "import errno, socket\n"
        "print(sorted(name for _, name in socket.if_nameindex()))\n"
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:\n"
        "    s.connect(('device-0', 9)); s.connect(('device-1', 9))\n"
        "    print(errno.errorcode[s.connect_ex(('192.0.2.1', 9))], errno.errorcode[s.connect_ex(('8.8.8.8', 9))])\n"
        "with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as s:\n"
        "    print(errno.errorcode[s.connect_ex(('2001:db8::1', 9))])\n"
    )
    status, lines, _ = run_all(made, [sys.executable, "-c", program])
    assert status == 0, lines
    for device in made.devices:
        interfaces, ipv4, ipv6 = lines[device.name]
        assert interfaces == "['eth0', 'lo']"
        assert ipv4 == "ENETUNREACH ENETUNREACH"
        assert ipv6 in ("ENETUNREACH", "EADDRNOTAVAIL")


def test_memory_limit_ends_a_hog_and_is_told(prefix: str) -> None:
    made = up([1, 1], 10**9, memory_bytes=[64 << 20, None], prefix=prefix)
    status, _, ends = run_all(made, [sys.executable, "-c", "print(len(bytearray(128 << 20)))"])
    assert status == 128 + signal.SIGKILL
    assert ends["device-0"].out_of_memory == 1
    assert "memory limit of 64 MiB" in ends["device-0"].in_words()
    assert ends["device-1"].returncode == 0


def test_private_folder(prefix: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the machine")
    made = up([1, 1], 10**9, private=[tmp_path], prefix=prefix)
    status, lines, _ = run_all(made, ["sh", "-c", f"cd {tmp_path} && ls -A && echo {{name}} > mine"])
    assert (status, lines) == (0, {"device-0": [], "device-1": []})
    status, lines, _ = run_all(made, ["cat", f"{tmp_path}/mine"])  # a device finds again what it wrote
    assert (status, lines) == (0, {"device-0": ["device-0"], "device-1": ["device-1"]})
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]
    down(prefix)
    assert left_behind(prefix) == []
    assert (tmp_path / "secret").read_text() == "of the machine"


def test_private_folder_that_devices_need_is_refused(prefix: str, tmp_path: Path) -> None:
    for folder in (Path(sys.prefix), Path("/"), tmp_path / "missing"):
        with pytest.raises(BadInput, match="--private"):
            up([1], 10**9, private=[folder], prefix=prefix)
    assert left_behind(prefix) == []


def test_failing_up_leaves_nothing(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = network.make_device

    def fails_at_the_third(prefix: str, device: str, rank: int, *rest: object) -> tuple[str, str]:
        if rank == 2:
            raise PotluckError("no third")
        return real(prefix, device, rank, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(network, "make_device", fails_at_the_third)
    with pytest.raises(PotluckError, match="no third"):
        up([1, 1, 1], 10**9, memory_bytes=[64 << 20] * 3, prefix=prefix)
    assert left_behind(prefix) == []


def test_down_after_up_was_killed_half_way(prefix: str) -> None:
    program = f"from potluck.testbed import up; up([1] * 40, 10**9, memory_bytes=[1 << 28] * 40, prefix='{prefix}')"
    half = subprocess.Popen([sys.executable, "-P", "-c", program])
    deadline = time.monotonic() + 20
    while len(network.found(prefix)) < 5 and time.monotonic() < deadline:
        time.sleep(0.005)
    half.kill()
    half.wait()
    assert network.found(prefix)
    assert not state_file(prefix).exists()
    with pytest.raises(BadInput, match="half of one"):
        up([1], 10**9, prefix=prefix)
    assert down(prefix)
    assert left_behind(prefix) == []
    up([1], 10**9, prefix=prefix)


def test_down_without_state_ends_what_runs(prefix: str) -> None:
    made = up([1, 1], 10**9, memory_bytes=[1 << 28, None], prefix=prefix)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('on', flush=True); time.sleep(600)"
    running = [python(made, rank, stubborn) for rank in (0, 1)]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
    state_file(prefix).unlink()
    assert down(prefix)
    for process in running:
        assert process.wait(timeout=5) != 0
        assert process.stdout is not None
        process.stdout.close()
    assert left_behind(prefix) == []


def test_nothing_survives_its_command(prefix: str) -> None:
    made = up([1], 10**9, prefix=prefix)
    marker = f"survivor-{os.getpid()}"
    stray = f"setsid sh -c 'sleep 600; :' {marker} & echo on; "
    run_all(made, ["sh", "-c", stray + "exit 0"])
    assert not alive(marker)
    killed = subprocess.Popen(
        made.devices[0].command(["sh", "-c", stray + "sleep 600"]), stdout=subprocess.PIPE, text=True
    )
    assert killed.stdout is not None
    assert killed.stdout.readline() == "on\n"
    killed.kill()
    killed.wait()
    killed.stdout.close()
    deadline = time.monotonic() + 5
    while alive(marker) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(marker)


def test_interrupt_ends_all_devices(prefix: str) -> None:
    up([1, 1], 10**9, prefix=prefix)
    marker = f"interrupted-{os.getpid()}"
    program = (
        "from potluck.testbed import read, run\n"
        f"bed = read('{prefix}')\n"
        "run(bed, ['sh', '-c', 'trap \"echo asked; exit 3\" INT; echo on; while :; do sleep 0.1; done', "
        f"'{marker}'], lambda device, stream, line: print(line, flush=True))\n"
    )
    running = subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert [running.stdout.readline() for _ in range(2)] == ["on\n"] * 2
    running.send_signal(signal.SIGINT)
    rest, _ = running.communicate(timeout=15)
    assert rest == "asked\nasked\n"  # once each
    assert not alive(marker)


@pytest.mark.slow
def test_calibration_finds_each_device_at_its_speed(prefix: str) -> None:
    made = up([1.42, 1, 1], 10**9, names=_NAMES, prefix=prefix)
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        pytest.skip("this process itself runs in real time")
    measured = calibrate(made, burst_ms=4, seconds=3)
    assert [each.name for each in measured] == _NAMES
    assert all(abs(each.error) <= 0.05 for each in measured)
    assert all(each.bursts > 50 for each in measured)


@pytest.mark.slow
def test_calibration_refuses_devices_that_cannot_keep_up(prefix: str) -> None:
    made = up([1, 1], 10**9, prefix=prefix)
    cores = len(os.sched_getaffinity(0))
    too_many = tuple(made.devices[0].model_copy(update={"speed": 0.9}) for _ in range(2 * cores))
    with pytest.raises(PotluckError, match="off their speed by more than 5%"):
        calibrate(made.model_copy(update={"devices": too_many}), seconds=1)
