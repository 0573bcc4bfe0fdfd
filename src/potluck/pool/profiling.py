"""Profiles made apart from a run, in a process of their own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from potluck.control.names import host_name
from potluck.errors import BadInput, PotluckError
from potluck.job import Job
from potluck.job_sections import Data
from potluck.models.families import decoder_for, read_config
from potluck.models.families.fields import config_from, fields_of
from potluck.models.source import resolve
from potluck.pool.launch import run_devices
from potluck.pool.link import nic_link
from potluck.pool.local import check_pace, threads_of
from potluck.pool.measured_work import work_of
from potluck.pool.owner import read_training_data
from potluck.pool.profile import Profile, Work, parse_profile
from potluck.pool.spec import DeviceSpec

Tell = Callable[[str], None]


def profile_job(
    job: Job,
    *,
    name: str | None = None,
    threads: int | None = None,
    pace: float | None = None,
    owners: int = 1,
    tell: Tell | None = None,
) -> Profile:
    """Measure this machine at a job's work: seconds, memory, and what its network interface promises.

    Args:
        job: its model and data are here; ``dtype: auto`` is decided by what is faster here.
        name: of the device; the host's name if left out.
        threads: to compute with; the job's, or all cores, if left out.
        pace: speed of an emulated device, above 0 and at most 1.
        owners: devices of the pool that bring data.
        tell: called with one line before something slow.

    Raises:
        BadInput: the job, its model or data, or an argument cannot be used.
        DeviceLost: the measuring process was killed, as by an instruction that the processor lacks.
    """
    threads = (job.threads or None) if threads is None else threads
    _check(threads, pace)
    model_dir = resolve(job.model, tell=tell)
    config = read_config(model_dir)
    decoder = decoder_for(config, job)
    examples = read_training_data(job, model_dir, decoder).examples
    decided = job if job.dtype != "auto" else job.model_copy(update={"dtype": "fp32"})  # until the process decides
    work = work_of(decided, config, examples, owners)
    return _measured_apart(work, job, name, threads, pace, tell)


def profile_work(
    work: Work,
    *,
    name: str | None = None,
    threads: int | None = None,
    pace: float | None = None,
    tell: Tell | None = None,
) -> Profile:
    """The same for the work of another device's profile: neither model nor data need be here.

    Raises:
        BadInput: the work's model or an argument cannot be used.
        DeviceLost: the measuring process was killed, as by an instruction that the processor lacks.
    """
    _check(threads, pace)
    # What a device is measured at follows from the work alone; of the job it reads the dtype.
    job = Job(model="-", data=Data(train=["-"]), output=Path("-"), dtype=work.dtype, train=work.train)
    known_here = work.model_copy(update={"config": fields_of(config_from(work.config))})
    measured = _measured_apart(known_here, job, name, threads, pace, tell)
    return measured.model_copy(update={"work": work})  # that of the other profile, beside which it is put


def _check(threads: int | None, pace: float | None) -> None:
    if threads is not None and not 1 <= threads <= (os.cpu_count() or 1):
        raise BadInput(f"threads: this machine computes with 1 to {os.cpu_count()} threads, not {threads}.")
    check_pace(pace)


def _measured_apart(
    work: Work, job: Job, name: str | None, threads: int | None, pace: float | None, tell: Tell | None
) -> Profile:
    name = host_name() if name is None else name
    spec = DeviceSpec(
        task="measure",
        name=name,
        rank=0,
        world_size=1,
        names=(name,),
        job=job.model_dump(mode="json"),
        threads=threads_of(0, paced=pace is not None) if threads is None else threads,
        pace=pace,
        work=work.model_dump(mode="json"),
        fresh=True,  # who asks for a profile may have closed what disturbed the last one
    )
    found: list[Profile] = []

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "profile":
            found.append(parse_profile(event["profile"], where=name))

    if tell is not None:
        tell(f"Measuring {name}, for about 15 seconds.")
    run_devices([spec.model_dump(mode="json")], on_event)
    if not found:
        raise PotluckError(f"{name} ended without a profile.")
    return found[0].model_copy(update={"link": nic_link()})
