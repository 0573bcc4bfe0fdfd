"""The machine and its memory, read from fake files."""

from pathlib import Path

import psutil
import pytest

import potluck.pool.machine as machine_module
from potluck.pool.machine import available_bytes, machine_of

GIB = 1 << 30


@pytest.fixture(autouse=True)
def _plenty(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 GiB of which 12 are free, and a process that holds nothing."""
    memory = psutil.virtual_memory()._replace(total=16 * GIB, available=12 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(machine_module, "memory_mib", lambda field: 0.0)


def cgroup(root: Path, path: str, files: dict[str, object], membership: str) -> dict[str, Path]:
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_text(f"{content}\n")
    (root / "membership").write_text(membership)
    return {"cgroups": root, "membership": root / "membership"}


V1 = "9:name=systemd:/\n4:memory:/user/one\n1:cpu,cpuacct:/\n0::/\n"


def test_without_a_limit_what_the_system_has(tmp_path: Path) -> None:
    assert available_bytes(cgroups=tmp_path, membership=tmp_path / "none") == 12 * GIB
    files = {"memory.limit_in_bytes": 9223372036854771712, "memory.usage_in_bytes": GIB}
    assert available_bytes(**cgroup(tmp_path, "memory/user/one", files, V1)) == 12 * GIB
    assert (
        available_bytes(**cgroup(tmp_path, "one", {"memory.max": "max", "memory.current": 5}, "0::/one\n")) == 12 * GIB
    )


def test_a_v1_limit_bounds_it(tmp_path: Path) -> None:
    files = {
        "memory.limit_in_bytes": 2 * GIB,
        "memory.usage_in_bytes": GIB,
        "memory.stat": f"cache 7\ninactive_file 5\ntotal_inactive_file {GIB // 4}\ntotal_active_file {GIB // 4}",
    }
    assert available_bytes(**cgroup(tmp_path, "memory/user/one", files, V1)) == 1.5 * GIB


def test_a_v2_limit_further_up_bounds_it(tmp_path: Path) -> None:
    where = cgroup(tmp_path, "a/b", {"memory.max": "max", "memory.current": GIB}, "0::/a/b\n")
    above = {"memory.max": 3 * GIB, "memory.current": GIB, "memory.stat": f"anon 1\ninactive_file {GIB // 2}"}
    cgroup(tmp_path, "a", above, "0::/a/b\n")
    assert available_bytes(**where) == 2.5 * GIB


def test_in_a_container_the_root_is_what_is_seen(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": 2 * GIB, "memory.usage_in_bytes": GIB}
    assert available_bytes(**cgroup(tmp_path, "memory", files, "4:memory:/docker/5a/b\n")) == GIB


def test_what_this_process_holds_will_be_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "memory_mib", lambda field: 512.0 if field == "RssAnon" else 700.0)
    where = cgroup(tmp_path, "one", {"memory.max": 2 * GIB, "memory.current": 2 * GIB}, "0::/one\n")
    assert available_bytes(**where) == GIB // 2


def test_never_more_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "memory_mib", lambda field: 8 * 1024.0)
    assert available_bytes(cgroups=tmp_path, membership=tmp_path / "none") == 16 * GIB


@pytest.mark.parametrize(
    ("cpuinfo", "board", "processor"),
    [
        (
            "processor\t: 0\nmodel name\t: AMD Ryzen 7\n\nprocessor\t: 1\nmodel name\t: AMD Ryzen 7\n",
            None,
            "AMD Ryzen 7",
        ),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n", "Raspberry Pi 5\0", "Raspberry Pi 5"),
        ("processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: 0xd0b\n", None, "implementer 0x41 part 0xd0b"),
    ],
)
def test_the_processor_by_name(cpuinfo: str, board: str | None, processor: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    if board is not None:
        (tmp_path / "board").write_text(board)
    found = machine_of(3, cpuinfo=tmp_path / "cpuinfo", board=tmp_path / "board")
    assert (found.processor, found.threads) == (processor, 3)
    assert found.cores >= 1


def test_a_machine_without_proc_has_a_name(tmp_path: Path) -> None:
    assert machine_of(1, cpuinfo=tmp_path / "none", board=tmp_path / "none").processor
