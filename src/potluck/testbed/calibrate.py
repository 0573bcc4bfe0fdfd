"""Whether every device is as fast as it should be, while all of them compute."""

import json
import subprocess
import sys
from dataclasses import dataclass

import psutil

from potluck.errors import BadInput, PotluckError
from potluck.testbed.state import Testbed, TestDevice

TOLERANCE = 0.05
_BEYOND_S = 30.0


@dataclass(frozen=True)
class Calibration:
    """What one device did."""

    name: str
    speed: float
    """What it should be."""
    achieved: float
    """CPU seconds a wall second."""
    bursts: int

    @property
    def error(self) -> float:
        """Part by which it is too fast, or, below 0, too slow."""
        return self.achieved / self.speed - 1


def calibrate(
    testbed: Testbed, *, burst_ms: float = 4.0, seconds: float = 5.0, tolerance: float | None = TOLERANCE
) -> tuple[Calibration, ...]:
    """Let every device at once replay bursts of a job, paced to its speed, and measure the speed it achieves.

    Args:
        testbed: the testbed that is up.
        burst_ms: CPU time between two messages.
        seconds: wall time of the measurement.
        tolerance: the part by which a device may be off; None only measures.

    Raises:
        BadInput: ``burst_ms`` or ``seconds`` is not above 0.
        PotluckError: a device is off its speed by more than ``tolerance``, or broke down.
    """
    if not burst_ms > 0 or not seconds > 0:
        raise BadInput("--burst-ms and --seconds are above 0.")
    running: list[tuple[TestDevice, subprocess.Popen[str]]] = []
    try:
        for device in testbed.devices:
            running.append((device, _start(device, burst_ms, seconds)))
        for device, process in running:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise _broke_down(device, process)
        busy_before = _busy_cpu_s()
        for device, process in running:
            _begin(device, process)
        calibrations = tuple(_result(device, process, seconds) for device, process in running)
        busy_s = _busy_cpu_s() - busy_before
    finally:
        for _, process in running:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
    off = [each for each in calibrations if tolerance is not None and abs(each.error) > tolerance]
    if off:
        others = max(0.0, busy_s / seconds - sum(each.achieved for each in calibrations))
        described = ", ".join(f"{each.name} {each.achieved:.3f} instead of {each.speed:.3f}" for each in off)
        raise PotluckError(
            f"Devices off their speed by more than {tolerance:.0%}: {described}. Meanwhile the rest of the machine "
            f"computed on {others:.2f} cores: end what else runs, or take lower speeds."
        )
    return calibrations


def _start(device: TestDevice, burst_ms: float, seconds: float) -> "subprocess.Popen[str]":
    numbers = ("--speed", str(device.speed), "--burst-ms", str(burst_ms), "--seconds", str(seconds))
    return subprocess.Popen(
        device.command([sys.executable, "-P", "-m", "potluck.testbed.burst", *numbers]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _begin(device: TestDevice, process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    try:
        process.stdin.write("\n")
        process.stdin.flush()
    except BrokenPipeError:
        raise _broke_down(device, process) from None


def _result(device: TestDevice, process: "subprocess.Popen[str]", seconds: float) -> Calibration:
    try:
        said, _ = process.communicate(timeout=seconds + _BEYOND_S)
        measured = json.loads(said)
        achieved = measured["cpu_s"] / measured["wall_s"]
        return Calibration(device.name, device.speed, achieved, measured["bursts"])
    except (subprocess.TimeoutExpired, ValueError):
        raise _broke_down(device, process) from None


def _broke_down(device: TestDevice, process: "subprocess.Popen[str]") -> PotluckError:
    process.kill()
    _, words = process.communicate()
    return PotluckError(f"{device.name} could not be calibrated. Its last words were:\n{words.strip()[-2000:]}")


def _busy_cpu_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)
