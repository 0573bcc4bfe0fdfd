"""What a device is: processor, cores, and the memory a new process can have."""

import contextlib
import os
import platform
from pathlib import Path

import psutil

from potluck.models.memory import memory_mib
from potluck.pool.profile import Machine

_CPUINFO = Path("/proc/cpuinfo")
_BOARD = Path("/proc/device-tree/model")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")


def machine_of(threads: int, *, cpuinfo: Path = _CPUINFO, board: Path = _BOARD) -> Machine:
    """This machine; its cores are those that this process may use."""
    return Machine(
        processor=_processor(cpuinfo, board),
        architecture=platform.machine(),
        cores=usable_cores(),
        threads=threads,
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor(cpuinfo: Path, board: Path) -> str:
    """The model name (x86), or the board (arm64, whose cpuinfo has numbers only)."""
    try:
        lines = [line.partition(":") for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in reversed(lines)}
    if "model name" in fields:
        return fields["model name"]
    try:
        return board.read_text(encoding="utf-8", errors="replace").rstrip("\0\n")
    except OSError:
        pass
    if "CPU part" in fields:
        return f"implementer {fields.get('CPU implementer', '?')} part {fields['CPU part']}"
    return platform.processor() or platform.machine()


def available_bytes(*, membership: Path = _MEMBERSHIP, cgroups: Path = _CGROUPS) -> int:
    """Memory that a process could have in place of this one.

    What the system calls available, or less where a cgroup (v1 or v2) of this process or one above it has less left
    below its limit; page cache counts as free. What this process holds itself is added: it will be gone.
    """
    own = int((memory_mib("RssAnon") or memory_mib("VmRSS")) * 2**20)
    left = [psutil.virtual_memory().available]
    for directory, limit_file, usage_file, prefix in _memory_cgroups(membership, cgroups):
        limit, usage = _number(directory / limit_file), _number(directory / usage_file)
        if limit is not None and usage is not None:
            left.append(max(0, limit - usage + _page_cache(directory, prefix)))
    return min(min(left) + own, psutil.virtual_memory().total)


def _memory_cgroups(membership: Path, cgroups: Path) -> list[tuple[Path, str, str, str]]:
    """This process's memory cgroup and those above it: directory, files of limit and usage, prefix in its stat."""
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = cgroups, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            root, files = cgroups / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        else:
            continue
        # In a container the path is the host's, of which only the root may be seen here.
        inside = root / path.lstrip("/")
        found += [(directory, *files) for directory in (inside, *inside.parents) if directory.is_relative_to(root)]
    return found


def _number(file: Path) -> int | None:
    """The number in a file; None where there is none, as in ``max``."""
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _page_cache(directory: Path, prefix: str) -> int:
    try:
        lines = (directory / "memory.stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    fields = dict(line.split(" ", 1) for line in lines if " " in line)
    return sum(int(fields.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))


def forget_peak() -> None:
    """Let ``VmHWM`` of this process count from now; without effect where /proc does not allow it."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
