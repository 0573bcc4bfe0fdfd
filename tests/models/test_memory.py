"""What a process holds."""

from potluck.models.memory import memory_mib


def test_memory_is_the_processes_own() -> None:
    before = memory_mib("VmRSS")
    held = b"\1" * (64 << 20)
    assert memory_mib("VmRSS") - before > 0.9 * (len(held) >> 20)
    assert memory_mib("VmHWM") > before + 0.9 * (len(held) >> 20)
    assert memory_mib("VmHWM", 1) != memory_mib("VmHWM")
    assert memory_mib("VmHWM", 1 << 30) == 0.0
