import os
import subprocess
import sys
import time

import pytest

from potluck.chain.pace import Pace


def compute(cpu_s: float) -> None:
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


@pytest.mark.parametrize("speed", [0, -1, 1.1, float("nan")])
def test_speed_outside(speed: float) -> None:
    with pytest.raises(ValueError, match="above 0 and at most 1"):
        Pace(speed)


def test_computing_takes_as_long_as_at_its_speed() -> None:
    pace = Pace(0.25)
    start = time.perf_counter()
    for _ in range(5):
        compute(0.004)
        pace.catch_up()
    assert time.perf_counter() - start >= 5 * 0.004 / 0.25 - 0.001


@pytest.mark.timing
def test_what_came_too_late_is_made_up_for() -> None:
    pace = Pace(0.5)
    start = time.perf_counter()
    time.sleep(0.015)  # another device's turn
    for _ in range(4):
        compute(0.01)
        pace.catch_up()
    assert 0.079 <= time.perf_counter() - start < 0.092 + _held_up(start, 0.04)


def test_waiting_is_not_made_up_for() -> None:
    pace = Pace(0.5)
    time.sleep(0.015)
    pace.restart()
    start = time.perf_counter()
    compute(0.01)
    pace.catch_up()
    assert time.perf_counter() - start >= 0.019


def _held_up(start: float, cpu_s: float) -> float:
    """Seconds that a busy machine may have taken from this test: none where nothing else runs."""
    return max(0.0, os.getloadavg()[0] - 1) * cpu_s


@pytest.mark.root
@pytest.mark.alone
def test_messages_go_before_compute_and_compute_before_the_rest() -> None:
    if os.geteuid() != 0:
        pytest.skip("real-time priorities need root")
    program = (
        "import os, threading\n"
        "from potluck.chain.pace import come_first\n"
        "stop = threading.Event()\n"
        "messages = threading.Thread(target=stop.wait); messages.start()\n"
        "if come_first():\n"
        "    later = threading.Thread(target=stop.wait); later.start()\n"
        "    threads = (threading.get_native_id(), messages.native_id, later.native_id)\n"
        "    print([os.sched_getparam(thread).sched_priority for thread in threads])\n"
        "stop.set()\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("this machine permits no real-time priorities")
    assert done.stdout == "[1, 2, 0]\n"


@pytest.mark.root
@pytest.mark.alone
def test_who_hands_a_message_over_goes_first_for_that_moment_only() -> None:
    if os.geteuid() != 0:
        pytest.skip("real-time priorities need root")
    program = (
        "import os\n"
        "from potluck.chain.pace import come_first, handing_over\n"
        "seen = []\n"
        "def look(): seen.append(os.sched_getparam(0).sched_priority)\n"
        "with handing_over(): look()\n"
        "if come_first():\n"
        "    with handing_over(): look()\n"
        "    look()\n"
        "    try:\n"
        "        with handing_over(): raise RuntimeError\n"
        "    except RuntimeError: look()\n"
        "    print(seen)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    if not done.stdout:
        pytest.skip("this machine permits no real-time priorities")
    assert done.stdout == "[0, 3, 1, 1]\n", "before coming first it has no effect"
