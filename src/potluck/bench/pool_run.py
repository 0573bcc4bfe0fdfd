"""Steps of ``bench pool``: every device measured, then every strategy's processes made and stepped in turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.bench.pool_hosts import Hosts
from potluck.bench.pool_plans import LIMIT, Entry
from potluck.bench.pool_spec import Event, RankSpec
from potluck.pool.profile import Profile, Work, parse_profile

MEASURE = "measure"
"""Name of the processes that measure."""

OnStep = Callable[[str, int, int], None]
"""Told which row steps now, and how many of how many steps are done."""


@dataclass(frozen=True)
class Step:
    """One measured step of one row."""

    sitting: int
    round: int
    """Steps of one sitting and round were taken one after the other."""
    ranks: tuple[Event, ...]
    """What each rank said of it, in order."""

    @property
    def step_s(self) -> float:
        """Of the slowest device."""
        return float(self.ranks[0]["step_s"])

    @property
    def devices(self) -> list[dict[str, float]]:
        """Each device's ``compute_s``, ``wait_s`` and ``transfer_s``."""
        return list(self.ranks[0]["devices"])


def measure_all(hosts: Hosts, job: dict[str, Any], work: Work, cache: Path) -> tuple[list[Profile], list[float]]:
    """Every device's profile, all measured at the same time, and the seconds each took.

    Raises:
        PotluckError: a device could not be measured.
    """
    devices = hosts.bed.devices
    specs = [
        RankSpec(
            task="measure",
            device=device.name,
            rank=device.rank,
            world_size=len(devices),
            address=device.address,
            store="",
            pace=device.speed,
            job=job,
            work=work.model_dump(mode="json"),
            cache=str(cache / device.name),
        )
        for device in devices
    ]
    told = hosts.begin(MEASURE, specs, "profile")
    hosts.end(MEASURE, [device.name for device in devices])
    profiles = [parse_profile(each["profile"], where=d.name) for each, d in zip(told, devices, strict=True)]
    return profiles, [float(each["took_s"]) for each in told]


def run_sitting(
    hosts: Hosts,
    entries: Sequence[Entry],
    work: Work,
    steps: int,
    *,
    sitting: int,
    on_step: OnStep,
) -> dict[str, list[Step]]:
    """Make the processes of these rows, step each in turn, and end them.

    Each row's first step warms up and is not kept. Whose turn is first rotates, and every row sees the same batches.

    Raises:
        PotluckError: a process ended.
    """
    found: dict[str, list[Step]] = {entry.name: [] for entry in entries}
    for entry in entries:
        hosts.begin(entry.name, _specs(hosts, entry, work), "ready")
    done, total = 0, len(entries) * (steps + 1)
    for number in range(steps + 1):
        first = number % len(entries)
        for entry in [*entries[first:], *entries[:first]]:
            on_step(entry.name, done, total)
            ranks = hosts.tell(entry.name, entry.devices, {"step": number}, "stepped")
            if number:
                found[entry.name].append(Step(sitting, number, tuple(ranks)))
            done += 1
    on_step("", done, total)
    for entry in entries:
        hosts.end(entry.name, entry.devices)
    return found


def needed_bytes(entry: Entry, shared_bytes: int) -> float:
    """Memory of a row's processes together, of which each shares ``shared_bytes`` with the one that forked it."""
    own = [max(0.0, device.memory_bytes - shared_bytes) for device in entry.prediction.devices]
    return sum(own) + len(own) * _TOUCHED_BYTES


_TOUCHED_BYTES = 64 << 20  # of what is shared, and so copied


def _specs(hosts: Hosts, entry: Entry, work: Work) -> list[RankSpec]:
    devices = {device.name: device for device in hosts.bed.devices}
    return [
        RankSpec(
            task="train",
            device=name,
            rank=rank,
            world_size=len(entry.devices),
            address=devices[name].address,
            store="",
            pace=None if entry.name == LIMIT else devices[name].speed,
            job=entry.job.model_dump(mode="json"),
            work=work.model_dump(mode="json"),
            plan=entry.plan.to_json(),
        )
        for rank, name in enumerate(entry.devices)
    ]


def steps_of(rows: Sequence[Mapping[str, list[Step]]]) -> dict[str, list[Step]]:
    """The steps of several sittings, by row."""
    joined: dict[str, list[Step]] = {}
    for row in rows:
        for name, steps in row.items():
            joined.setdefault(name, []).extend(steps)
    return joined
