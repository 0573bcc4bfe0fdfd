from pathlib import Path

from potluck.testbed import cgroup


def test_hierarchy_of_each_version(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory pids\n")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "cgroup.controllers").write_text("cpu\n")
    second = f"cgroup2 {tmp_path} cgroup2 rw 0 0"
    first = "cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0"
    assert cgroup.find_hierarchy(second) == cgroup.Hierarchy(tmp_path, 2)
    assert cgroup.find_hierarchy(f"cgroup2 {bare} cgroup2 rw 0 0\n{first}") == cgroup.Hierarchy(
        Path("/sys/fs/cgroup/memory"), 1
    )
    assert cgroup.find_hierarchy(f"cgroup2 {bare} cgroup2 rw 0 0\nproc /proc proc rw 0 0") is None


def test_kills_are_read_from_either_version(tmp_path: Path) -> None:
    assert cgroup.kills(tmp_path) == 0
    (tmp_path / "memory.events").write_text("low 0\nmax 12\noom 3\noom_kill 2\n")
    assert cgroup.kills(tmp_path) == 2
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 5\n")
    assert cgroup.kills(tmp_path) == 5
