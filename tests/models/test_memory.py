"""What a process holds."""

from potluck.models.memory import memory_mib


def test_memory_is_the_processes_own() -> None:
    held = bytearray(64 << 20)
    assert memory_mib("VmHWM") >= memory_mib("VmRSS") > len(held) >> 20
    assert memory_mib("VmHWM", 1) != memory_mib("VmHWM")
    assert memory_mib("VmHWM", 1 << 30) == 0.0
