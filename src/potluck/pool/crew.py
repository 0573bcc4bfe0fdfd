"""The devices of a run: processes of this machine, or this machine and those that joined it."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from potluck.control.address import listening_address
from potluck.control.files import ModelFiles
from potluck.control.front_door import FrontDoor
from potluck.control.identity import Identity
from potluck.control.members import Member
from potluck.control.names import check_name, host_name
from potluck.errors import BadInput, DeviceLost, from_outside
from potluck.job import Job
from potluck.pool.launch import PeerLost, run_devices
from potluck.pool.listener import Listener
from potluck.pool.local import check_pace, threads_of
from potluck.pool.members import Members
from potluck.pool.process import Event
from potluck.pool.ratio import parse_devices
from potluck.pool.spec import SHARED_FIELDS, without_paths

COORDINATOR = 0


@dataclass(frozen=True)
class Gathering:
    """How a pool of several machines comes together."""

    peers: int
    """How many other machines join."""
    name: str = ""
    """This machine's name in the pool; its hostname if empty."""
    address: str | None = None
    """Where this machine is reached; the address of its default route if left out."""
    port: int = 0
    """Where it listens; any free port if 0."""
    invite_minutes: float = 60.0
    """How long the invite holds."""


@dataclass(frozen=True)
class Manners:
    """How this machine computes."""

    nice: bool = False
    """Whether to stand back behind what people do on it."""
    pace: float | None = None
    """The speed of an emulated device."""

    def __post_init__(self) -> None:
        check_pace(self.pace)


class Crew(Protocol):
    """Devices that work on one job, by rank."""

    names: list[str]
    owners: list[int]
    """Ranks that have training data."""
    measured: bool
    """Whether shares follow measurements, unless the job says who holds what."""

    def run(self, task: str, job: Job, fields: dict[str, Any], on_event: Callable[[Event], None]) -> None:
        """Have every device do a task, and return when all have; ``fields`` go to the coordinator's device as they are,
        and to the others without what lies on this machine's disk.

        Raises:
            BadInput, DeviceLost, PotluckError: as :func:`potluck.pool.launch.run_devices`.
        """
        ...

    def keep(self, ranks: Sequence[int], why: str) -> None:
        """Let everybody else go, for the reason given."""
        ...


class LocalCrew:
    """Processes of this machine, which meet over a file."""

    def __init__(self, count: int, threads: int, manners: Manners) -> None:
        self.names = [f"device-{rank}" for rank in range(count)]
        self.owners = [COORDINATOR]
        self.measured = False  # the processes of one machine are alike
        self._manners = manners
        self._threads = threads_of(threads, devices=count, nice=manners.nice, paced=manners.pace is not None)

    def run(self, task: str, job: Job, fields: dict[str, Any], on_event: Callable[[Event], None]) -> None:
        """See :class:`Crew`."""
        with tempfile.TemporaryDirectory(prefix="potluck-") as private:  # made with mode 0700
            specs = [
                {
                    **_common(task, self.names, rank, self.owners),
                    **fields,
                    "job": job.model_dump(mode="json"),
                    "store": str(Path(private) / "store"),
                    "threads": self._threads,
                    "nice": self._manners.nice,
                    "pace": self._manners.pace,
                }
                for rank in range(len(self.names))
            ]
            run_devices(specs, on_event)

    def keep(self, ranks: Sequence[int], why: str) -> None:
        """See :class:`Crew`."""
        self.names = [self.names[rank] for rank in ranks]


class JoinedCrew:
    """This machine's device, and one on each machine that joined."""

    def __init__(self, door: FrontDoor, members: Members, joined: Sequence[Member], name: str, here: dict[str, Any]):
        self.names = [name, *(member.name for member in joined)]
        self.owners = [COORDINATOR, *(rank for rank, member in enumerate(joined, 1) if member.has_data)]
        self.measured = True
        self._door, self._members, self._here = door, members, here

    def run(self, task: str, job: Job, fields: dict[str, Any], on_event: Callable[[Event], None]) -> None:
        """See :class:`Crew`."""
        own = {
            **_common(task, self.names, COORDINATOR, self.owners),
            **fields,
            **self._here,
            "job": job.model_dump(mode="json"),
        }
        shared = {key: value for key, value in fields.items() if key in SHARED_FIELDS}
        if len(self.names) > 1:
            shared["generation"] = own["generation"] = self._door.new_generation()
            own["access"] = self._door.access.to_json()
        others = [
            self._members.device(
                name,
                {
                    **_common(task, self.names, rank, self.owners),
                    **shared,
                    "job": without_paths(job).model_dump(mode="json"),
                    "template": job.data.own_template(),
                },
            )
            for rank, name in enumerate(self.names)
            if rank != COORDINATOR
        ]
        try:
            run_devices([own], on_event, remote=others, check=self._members.check)
        except PeerLost as error:
            # who is still there has said by now how its device ended
            if silent := [device.name for device in others if not device.wait(0)]:
                raise DeviceLost(
                    f"{' and '.join(silent)} broke the connection and does not answer any more. The other devices"
                    " were ended; nothing was saved."
                ) from error
            raise

    def keep(self, ranks: Sequence[int], why: str) -> None:
        """See :class:`Crew`."""
        for rank, name in enumerate(self.names):
            if rank not in ranks:
                self._members.dismiss(name, why)
        self.owners = [ranks.index(owner) for owner in self.owners if owner in ranks]
        self.names = [self.names[rank] for rank in ranks]


@contextmanager
def joined_crew(
    job: Job, model_dir: Path, gathering: Gathering, manners: Manners, listener: Listener
) -> Iterator[JoinedCrew]:
    """Invite other machines and wait until all have come.

    Raises:
        BadInput: the address is not one of this machine.
        DeviceLost: somebody left.
    """
    name = gathering.name or host_name()
    address = listening_address(gathering.address)
    here = {
        "address": address,
        "threads": threads_of(job.threads, nice=manners.nice, paced=manners.pace is not None),
        "nice": manners.nice,
        "pace": manners.pace,
    }
    door = FrontDoor(
        Identity.load(),
        address,
        port=gathering.port,
        places=gathering.peers,
        invite_s=gathering.invite_minutes * 60,
        taken_names=[name],
        files=ModelFiles(model_dir),
    )
    with door, Members(door, name) as members:
        listener.invited(door.invite.encode(), gathering.peers, gathering.invite_minutes)
        joined = door.wait_for_members(
            lambda member: listener.tell(_has_joined(member)),
            lambda name, why: listener.tell(_has_left(name, why)),
        )
        members.welcome([member.name for member in joined])
        yield JoinedCrew(door, members, joined, name, here)


def check_gathering(job: Job, gathering: Gathering) -> None:
    """See that a job can be done by several machines.

    Raises:
        BadInput: it cannot, or the number of peers makes no sense.
    """
    if not 1 <= gathering.peers <= 63:
        raise BadInput(f"--peers {gathering.peers}: a pool has 1 to 63 other machines.")
    if gathering.name:
        check_name(gathering.name)
    check_devices(job, gathering.peers + 1, f"--peers {gathering.peers}")


def check_devices(job: Job, world_size: int, started_by: str) -> None:
    """See that a job fits the number of devices that something else than its ``devices`` decides.

    Raises:
        BadInput: it does not.
    """
    if job.strategy == "single":
        raise BadInput(f"strategy: 'single' runs on one device; leave out {started_by}, or use 'tensor' or 'auto'.")
    shares = parse_devices(job.devices)
    if len(shares) != world_size and job.devices != "1":
        raise BadInput(
            f"devices: '{job.devices}' does not fit {started_by}: leave it out and shares follow what each device can"
            f" do, or give {world_size} shares, the first for this one."
        )


def _common(task: str, names: Sequence[str], rank: int, owners: Sequence[int]) -> dict[str, Any]:
    return {
        "task": task,
        "name": names[rank],
        "rank": rank,
        "names": list(names),
        "world_size": len(names),
        "owns": rank in owners,
    }


def _has_joined(member: Member) -> str:
    brings = ", brings data" if member.has_data else ""
    threads = f"{member.threads} thread{'s' if member.threads != 1 else ''}"
    return f"{member.name} has joined from {member.address} ({threads}{brings})."


def _has_left(name: str, why: str) -> str:
    return f"{name} has left again ({from_outside(why).rstrip('.')}); its place is free."
