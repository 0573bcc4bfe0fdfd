"""A testbed is set up and taken down, whatever state it is in."""

import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from potluck.errors import BadInput, PotluckError
from potluck.testbed import cgroup, network
from potluck.testbed.options import (
    LOAD_PER_CORE,
    check_load,
    check_names,
    check_prefix,
    check_speeds,
    parse_names,
    scale_speeds,
)
from potluck.testbed.state import (
    DEFAULT_PREFIX,
    FOLDERS_DIRECTORY,
    STATE_DIRECTORY,
    Folder,
    Testbed,
    TestDevice,
    state_file,
    write,
)

_HOSTS = Path("/etc/hosts")
_GRACE_S = 2.0
_KILLED_S = 5.0


def up(
    speeds: Sequence[float],
    link_bits_per_s: int,
    *,
    names: Sequence[str] | None = None,
    memory_bytes: Sequence[int | None] | None = None,
    private: Sequence[Path] = (),
    load: float = LOAD_PER_CORE,
    prefix: str = DEFAULT_PREFIX,
) -> Testbed:
    """Set up one device a speed, joined by links of ``link_bits_per_s``; nothing is left of it where that fails.

    Args:
        speeds: ratios; scaled to at most 1 a device and ``load`` times the machine's cores together.
        link_bits_per_s: rate of each device's link to the bridge, in each direction.
        names: a host name a device; ``device-0``, ``device-1``, ... where None.
        memory_bytes: the most memory of each device; None is no limit.
        private: folders of which each device sees one of its own, empty at first and gone after :func:`down`.
        load: part of the cores that the devices' computing takes; what is left is for their messages.
        prefix: of the names of everything made; one testbed a prefix can be up.

    Raises:
        BadInput: the arguments are wrong, a testbed is up already, or root or a tool is missing.
        PotluckError: the kernel refused a part.
    """
    check_prefix(prefix)
    check_speeds(speeds)
    check_load(load)
    names = list(names) if names is not None else parse_names(None, len(speeds))
    check_names(names, len(speeds))
    limits = list(memory_bytes) if memory_bytes is not None else [None] * len(speeds)
    if len(limits) != len(speeds):
        raise BadInput(f"--memory: {len(limits)} sizes for {len(speeds)} devices.")
    folders = [_checked_folder(folder) for folder in private]
    _check_machine()
    with _only_one(prefix):
        if _left(prefix):
            raise BadInput("A testbed is up already, or half of one: 'potluck testbed down' removes it.")
        try:
            testbed = _set_up(prefix, scale_speeds(speeds, _cores(), load), names, limits, folders, link_bits_per_s)
            write(testbed)
        except BaseException:
            _take_down(prefix)
            raise
    return testbed


def down(prefix: str = DEFAULT_PREFIX) -> bool:
    """Remove the testbed of this prefix, or what is left of it, and end what runs in it; False if there was nothing.

    Raises:
        BadInput: root or a tool is missing, or the caller runs on one of the testbed's devices.
        PotluckError: a part cannot be removed.
    """
    check_prefix(prefix)
    _check_machine()
    with _only_one(prefix):
        return _take_down(prefix)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _checked_folder(folder: Path) -> Path:
    folder = folder.resolve()
    if not folder.is_dir():
        raise BadInput(f"--private: {folder} is no folder.")
    needed = (sys.executable, sys.prefix, sys.base_prefix, __file__)
    if any(Path(path).is_relative_to(folder) or Path(path).resolve().is_relative_to(folder) for path in needed):
        raise BadInput(f"--private: {folder} holds Python or potluck itself, which the devices need.")
    return folder


def _check_machine() -> None:
    if sys.platform != "linux":
        raise BadInput("A testbed needs Linux: it is made of network namespaces.")
    if os.geteuid() != 0:
        raise BadInput("A testbed needs root (network namespaces, cgroups): use sudo.")
    network.check_tools()


@contextmanager
def _only_one(prefix: str) -> Iterator[None]:
    """Keep other processes from setting up or taking down the same testbed meanwhile."""
    STATE_DIRECTORY.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (STATE_DIRECTORY / f"{prefix}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput("Somebody sets up or takes down a testbed right now: try again in a moment.") from None
        yield


def _left(prefix: str) -> bool:
    return state_file(prefix).exists() or bool(network.found(prefix)) or any(cgroup.found(prefix))


def _set_up(
    prefix: str,
    speeds: Sequence[float],
    names: Sequence[str],
    limits: Sequence[int | None],
    private: Sequence[Path],
    link_bits_per_s: int,
) -> Testbed:
    block = network.free_network()
    home = FOLDERS_DIRECTORY / prefix
    _remove_folders(home)  # what a machine that lost its power left
    home.mkdir(mode=0o700, parents=True)
    hosts = _write_hosts(home, names, block)
    network.make_switch(prefix)
    devices = []
    for rank, (name, speed, limit) in enumerate(zip(names, speeds, limits, strict=True)):
        namespace, address = network.make_device(prefix, name, rank, block, link_bits_per_s)
        devices.append(
            TestDevice(
                name=name,
                rank=rank,
                speed=speed,
                address=address,
                namespace=namespace,
                memory_bytes=limit,
                cgroup=None if limit is None else cgroup.make(prefix, name, limit),
                folders=(*hosts, *_make_folders(home / name, private)),
            )
        )
    return Testbed(prefix=prefix, network=str(block), link_bits_per_s=link_bits_per_s, devices=tuple(devices))


def _write_hosts(home: Path, names: Sequence[str], block: network.Network) -> tuple[Folder, ...]:
    """The file through which devices resolve each other's names."""
    if not _HOSTS.exists():
        return ()
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{block[rank + 1]} {name}" for rank, name in enumerate(names))]
    hosts = home / "hosts"
    hosts.write_text("\n".join(lines) + "\n", encoding="ascii")
    hosts.chmod(0o644)
    return (Folder(source=hosts, target=_HOSTS),)


def _make_folders(home: Path, private: Sequence[Path]) -> tuple[Folder, ...]:
    folders = tuple(Folder(source=home / str(number), target=target) for number, target in enumerate(private))
    for folder in folders:
        folder.source.mkdir(parents=True)
        shutil.copystat(folder.target, folder.source)
        status = folder.target.stat()
        os.chown(folder.source, status.st_uid, status.st_gid)
    return folders


def _take_down(prefix: str) -> bool:
    namespaces, cgroups = network.found(prefix), list(cgroup.found(prefix))
    _end_processes(namespaces, cgroups)
    for namespace in namespaces:
        network.remove(namespace)
    for directory in cgroups:
        cgroup.remove(directory)
    home = FOLDERS_DIRECTORY / prefix
    had_folders = home.exists()
    _remove_folders(home)
    had_state = state_file(prefix).exists()
    state_file(prefix).unlink(missing_ok=True)
    return bool(namespaces or cgroups or had_folders or had_state)


def _remove_folders(home: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(home)


def _end_processes(namespaces: Sequence[str], cgroups: Sequence[Path]) -> None:
    def running() -> set[int]:
        in_namespaces = (pid for namespace in namespaces for pid in network.processes(namespace))
        return {*in_namespaces, *(pid for directory in cgroups for pid in cgroup.processes(directory))}

    if os.getpid() in running():
        raise BadInput("This program runs on one of the devices: take the testbed down from outside.")
    for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, _KILLED_S)):
        deadline = time.monotonic() + patience_s
        for pid in running():
            _signal(pid, number)
        while (pids := running()) and time.monotonic() < deadline:
            time.sleep(0.05)
            if number == signal.SIGKILL:
                for pid in pids:
                    _signal(pid, number)
        if not pids:
            return
    raise PotluckError(f"Processes {', '.join(map(str, sorted(pids)))} on the testbed cannot be killed.")


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
