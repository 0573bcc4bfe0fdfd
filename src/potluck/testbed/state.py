"""The testbed that is up: its devices, and how a program is started on one of them. Kept in one JSON file."""

import sys
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.errors import BadInput
from potluck.testbed import enter
from potluck.testbed.options import check_prefix

STATE_DIRECTORY = Path("/run/potluck-testbed")
FOLDERS_DIRECTORY = Path("/var/lib/potluck-testbed")
"""On a disk: on a tmpfs, what a device keeps in its own folders would count against its memory limit."""
DEFAULT_PREFIX = "potluck"


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Folder(_Plain):
    """A folder of which each device sees one of its own."""

    source: Path
    """Where this device's lies on the machine."""
    target: Path
    """Where the device sees it."""


class TestDevice(_Plain):
    """One emulated device."""

    __test__: ClassVar[bool] = False  # or pytest takes it for a class of tests

    name: str
    """Its host name; other devices resolve it to its address."""
    rank: int
    speed: float
    """The part of a core it computes at, above 0 and at most 1: what ``--pace`` takes."""
    address: str
    """IPv4 address on the testbed's network."""
    namespace: str
    """Its network namespace, as ``ip netns`` shows it."""
    memory_bytes: int | None = None
    """The most memory it may have; None is no limit."""
    cgroup: Path | None = None
    """The cgroup directory that limits it; None without a limit."""
    folders: tuple[Folder, ...] = ()

    def command(self, argv: list[str]) -> list[str]:
        """What runs ``argv`` on this device, for ``subprocess`` of any root process.

        It runs in the device's namespaces (network, mounts, processes, host name) and memory cgroup. SIGINT goes to
        the whole process group of ``argv``, other signals that end a process to ``argv`` alone; the exit status,
        death by a signal included, is that of ``argv``. When it ends, or this command is killed, everything that it
        started ends.
        """
        options = ["--namespace", self.namespace, "--hostname", self.name]
        if self.cgroup is not None:
            options += ["--cgroup", str(self.cgroup)]
        for folder in self.folders:
            options += ["--bind", str(folder.source), str(folder.target)]
        return [sys.executable, "-I", "-S", str(enter.__file__), *options, "--", *argv]


class Testbed(_Plain):
    """Devices on one network."""

    __test__: ClassVar[bool] = False

    prefix: str
    """What the names of its namespaces and cgroups begin with."""
    network: str
    """The devices' IPv4 network, as ``10.77.0.0/24``."""
    link_bits_per_s: int
    """Rate of each device's link, in each direction."""
    devices: tuple[TestDevice, ...]

    def chosen(self, names: list[str]) -> tuple[TestDevice, ...]:
        """The devices of these names, or all of them where ``names`` is empty.

        Raises:
            BadInput: there is no device of that name.
        """
        for name in names:
            if name not in {device.name for device in self.devices}:
                known = ", ".join(device.name for device in self.devices)
                raise BadInput(f"--device: there is no '{name}' in this testbed; it has {known}.")
        return tuple(device for device in self.devices if not names or device.name in names)


def state_file(prefix: str) -> Path:
    """Where the testbed of this prefix is written down."""
    return STATE_DIRECTORY / f"{prefix}.json"


def read(prefix: str = DEFAULT_PREFIX) -> Testbed:
    """The testbed that is up.

    Raises:
        BadInput: none is, it may not be read, or its file is damaged.
    """
    check_prefix(prefix)
    path = state_file(prefix)
    try:
        return Testbed.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise BadInput("No testbed is up: start one with 'potluck testbed up --speeds 1:1 --link 1gbit'.") from None
    except PermissionError:
        raise BadInput(f"{path} may not be read: a testbed belongs to root, so use sudo.") from None
    except ValidationError:
        raise BadInput(f"{path} is damaged: 'potluck testbed down' removes the testbed without it.") from None


def write(testbed: Testbed) -> None:
    """Write down a testbed, for root only, whole or not at all."""
    path = state_file(testbed.prefix)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    partial.touch(mode=0o600, exist_ok=False)
    partial.write_text(testbed.model_dump_json(indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
