"""Memory limits by cgroup, version 1 or 2."""

import errno
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import PotluckError

_REMOVAL_S = 5.0


@dataclass(frozen=True)
class Hierarchy:
    """Where the machine's memory cgroups are."""

    root: Path
    version: int


def find_hierarchy(mounts: str | None = None) -> Hierarchy | None:
    """The memory controller's hierarchy; None where the machine has none.

    Args:
        mounts: text of /proc/self/mounts, which is read where this is None.
    """
    for line in (mounts if mounts is not None else Path("/proc/self/mounts").read_text(encoding="utf-8")).splitlines():
        _, target, kind, options = line.split()[:4]
        if kind == "cgroup" and "memory" in options.split(","):
            return Hierarchy(Path(target), 1)
        controllers = Path(target) / "cgroup.controllers"
        if kind == "cgroup2" and controllers.exists() and "memory" in controllers.read_text(encoding="ascii").split():
            return Hierarchy(Path(target), 2)
    return None


def cgroup_name(prefix: str, device: str) -> str:
    """Name of a device's cgroup directory."""
    return f"{prefix}-testbed-{device}"


def make(prefix: str, device: str, memory_bytes: int) -> Path:
    """Make a cgroup whose processes together have at most ``memory_bytes``, and no swap beside it.

    Raises:
        PotluckError: the machine has no memory cgroups, or will not have this one.
    """
    hierarchy = find_hierarchy()
    if hierarchy is None:
        raise PotluckError(
            f"--memory: {device} cannot be limited: no memory cgroups are mounted (/proc/self/mounts). "
            "Boot with cgroup_enable=memory, or leave --memory out."
        )
    directory = hierarchy.root / cgroup_name(prefix, device)
    try:
        if hierarchy.version == 2:
            _turn_on_memory(hierarchy.root)
        directory.mkdir()
        _limit(directory, memory_bytes, hierarchy.version)
    except OSError as error:
        raise PotluckError(f"--memory: {device} cannot be limited by {directory}: {error.strerror}.") from None
    return directory


def _turn_on_memory(root: Path) -> None:
    control = root / "cgroup.subtree_control"
    if "memory" not in control.read_text(encoding="ascii").split():
        control.write_text("+memory", encoding="ascii")


def _limit(directory: Path, memory_bytes: int, version: int) -> None:
    names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if version == 1 else ("memory.max",)
    for name in names:
        if (directory / name).exists():  # memsw is there only where swap is counted
            (directory / name).write_text(str(memory_bytes), encoding="ascii")
    if version == 2 and (directory / "memory.swap.max").exists():
        (directory / "memory.swap.max").write_text("0", encoding="ascii")


def kills(directory: Path) -> int:
    """Processes of this cgroup that were killed so far because it was out of memory."""
    for name in ("memory.oom_control", "memory.events"):
        if (directory / name).exists():
            for line in (directory / name).read_text(encoding="ascii").splitlines():
                key, value = line.split()
                if key == "oom_kill":
                    return int(value)
    return 0


def found(prefix: str) -> Iterator[Path]:
    """Cgroups of this prefix's devices, whoever made them."""
    hierarchy = find_hierarchy()
    if hierarchy is not None:
        yield from sorted(hierarchy.root.glob(cgroup_name(prefix, "*")))


def processes(directory: Path) -> list[int]:
    """Ids of the processes in a cgroup."""
    try:
        return [int(pid) for pid in (directory / "cgroup.procs").read_text(encoding="ascii").split() if int(pid) > 0]
    except OSError:
        return []


def remove(directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
    """Remove a cgroup that has no processes; those that have just ended may hold it for a moment.

    Raises:
        PotluckError: it cannot be removed.
    """
    deadline = clock() + _REMOVAL_S
    while True:
        try:
            directory.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or clock() > deadline:
                raise PotluckError(f"The cgroup {directory} cannot be removed: {error.strerror}.") from None
        time.sleep(0.02)
