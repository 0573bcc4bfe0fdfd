"""A run on ranks that somebody else has started: ``torchrun``, or a scheduler that sets RANK and WORLD_SIZE.

Every rank is a process that runs ``potluck tune`` with the same job file. Rank 0 reads the data, plans and writes the
result; the others do what it puts into the launcher's store, on one process group.
"""

import ipaddress
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, ProcessGroup  # type: ignore[attr-defined]

from potluck.chain.comm import gloo_group
from potluck.control.address import address_towards, listening_address
from potluck.errors import DeviceLost
from potluck.job import Job
from potluck.models.memory import free_at_once, memory_mib
from potluck.models.source import resolve
from potluck.pool.crew import COORDINATOR, Manners
from potluck.pool.device import SILENCE_S, finished, run_task
from potluck.pool.local import threads_of
from potluck.pool.process import Event
from potluck.pool.ranks import Launch, Ranks
from potluck.pool.spec import SHARED_FIELDS, DeviceSpec


class LaunchedCrew:
    """The ranks of a launcher, as one of them sees them; each works in its own process."""

    def __init__(self, ranks: Ranks, model_dir: Path, threads: int, manners: Manners) -> None:
        launch = ranks.launch
        self.names = [f"rank-{rank}" for rank in range(launch.world_size)]
        self.owners = [COORDINATOR]
        self.measured = True
        self._ranks = ranks
        self._taking_part = list(range(launch.world_size))
        self._own = {
            "model_dir": str(model_dir),
            "threads": threads_of(
                threads, devices=launch.processes_here, nice=manners.nice, paced=manners.pace is not None
            ),
            "nice": manners.nice,
            "pace": manners.pace,
        }
        self._group: tuple[list[int], ProcessGroup | None] | None = None
        self._tasks = 0
        self._imported_mib = memory_mib("VmRSS")
        free_at_once()

    def run(self, task: str, job: Job, fields: dict[str, Any], on_event: Callable[[Event], None]) -> None:
        """See :class:`potluck.pool.crew.Crew`."""
        for rank in self._taking_part[1:]:
            self._ranks.hear(f"here/{rank}")
        common = {
            "task": task,
            "names": self.names,
            "world_size": len(self.names),
            "job": job.model_dump(mode="json") | {"overwrite": False},
            **{key: value for key, value in fields.items() if key in SHARED_FIELDS},
        }
        self._ranks.say(f"task/{self._tasks}", {"ranks": self._taking_part, "spec": common})
        own = {"owns": True, "result_dir": fields.get("result_dir")}
        self._work(self._taking_part, common | own, on_event)
        for rank in self._taking_part[1:]:
            for event in self._ranks.hear(f"said/{self._tasks}/{rank}"):
                on_event(event)
        self._tasks += 1

    def keep(self, ranks: Sequence[int], why: str) -> None:
        """See :class:`potluck.pool.crew.Crew`; who is let go waits for the end, as launchers expect of their ranks."""
        self._taking_part = [self._taking_part[rank] for rank in ranks]
        self.names = [self.names[rank] for rank in ranks]

    def serve(self) -> None:
        """Do, as another rank than 0, what rank 0 says, until it says no more.

        Raises:
            PotluckError: another rank failed, or a task failed here.
        """
        rank = self._ranks.launch.rank
        self._ranks.say(f"here/{rank}", True)
        while (task := self._ranks.hear(f"task/{self._tasks}")) is not None:
            if rank in task["ranks"]:
                said: list[Event] = []
                self._work(task["ranks"], task["spec"], said.append)
                self._ranks.say(f"said/{self._tasks}/{rank}", said)
            self._tasks += 1

    def _work(self, ranks: list[int], fields: Mapping[str, Any], emit: Callable[[Event], None]) -> None:
        rank = ranks.index(self._ranks.launch.rank)
        spec = DeviceSpec.model_validate({**fields, **self._own, "rank": rank, "name": fields["names"][rank]})
        try:
            run_task(spec, lambda: self._group_of(ranks), emit)
        except DeviceLost:
            self._ranks.cause()
            raise
        emit(finished(rank, self._imported_mib))

    def _group_of(self, ranks: list[int]) -> ProcessGroup | None:
        """The process group of these ranks, made anew only where they are others than before."""
        if self._group is None or self._group[0] != ranks:
            launch, group = self._ranks.launch, None
            if len(ranks) > 1:
                store = PrefixStore(f"gloo/{self._tasks}", self._ranks.store)
                rank, address = ranks.index(launch.rank), address_towards(launch.host)
                if ipaddress.ip_address(address).is_loopback and not _is_loopback(launch.host):
                    address = listening_address(None)  # /etc/hosts gives this machine's own name 127.0.1.1
                group = gloo_group(store, rank, len(ranks), address, timeout_s=SILENCE_S)
            self._group = (ranks, group)
        return self._group[1]


@contextmanager
def led_ranks(launch: Launch) -> Iterator[Ranks]:
    """All ranks, for rank 0; when the block ends, the others are told how.

    Raises:
        DeviceLost: the launcher's store does not answer.
    """
    with _telling_the_others(Ranks(launch)) as ranks:
        yield ranks


def serve_launched(job: Job, launch: Launch, manners: Manners) -> None:
    """Be another rank than 0 of a launch, until rank 0 is done.

    Raises:
        BadInput: the model is not on this machine, or rank 0 refused the job.
        DeviceLost: another rank ended.
        PotluckError: rank 0 failed, or a task failed here.
    """
    with _telling_the_others(Ranks(launch)) as ranks:
        LaunchedCrew(ranks, resolve(job.model), job.threads, manners).serve()


@contextmanager
def _telling_the_others(ranks: Ranks) -> Iterator[Ranks]:
    try:
        yield ranks
    except BaseException as error:
        ranks.end(error)
        raise
    ranks.end(None)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
