"""Emulated devices on one machine: a network namespace each, links of a given rate, memory limits, paced compute.

Needs root and Linux. Nothing that a device sends leaves the machine.

>>> from potluck import testbed
>>> testbed.up([1.42, 1, 1], link_bits_per_s=10**9)  # doctest: +SKIP
>>> for device in testbed.read().devices:  # doctest: +SKIP
...     subprocess.Popen(device.command(["potluck", "join", invite, "--pace", str(device.speed)]))
>>> testbed.down()  # doctest: +SKIP
"""

from potluck.testbed.calibrate import Calibration, calibrate
from potluck.testbed.lifecycle import down, up
from potluck.testbed.run import run
from potluck.testbed.state import Testbed, TestDevice, read

__all__ = ["Calibration", "TestDevice", "Testbed", "calibrate", "down", "read", "run", "up"]
