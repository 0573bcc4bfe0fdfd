"""One device's part in one strategy of ``bench pool``: a forked process that waits on a pipe between its steps."""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from potluck.bench.pool_counters import Stalls
from potluck.bench.pool_spec import Event, RankSpec
from potluck.chain.comm import Comm, gloo_group
from potluck.chain.pace import Pace, come_first
from potluck.job import Job
from potluck.models.families import decoder_for
from potluck.models.families.fields import Fields
from potluck.models.memory import memory_mib, trim
from potluck.models.precision import torch_dtype
from potluck.models.random_weights import RandomWeights
from potluck.pool.link import measure_link
from potluck.pool.measure import measure
from potluck.pool.measured_work import message_bytes
from potluck.pool.plan import Plan
from potluck.pool.profile import Work
from potluck.pool.step import OWNER, Stepper
from potluck.pool.strategies.build import part_for, rows_dealt_at_once, strategy_for
from potluck.pool.trainer import settings_of
from potluck.pool.turns import Turn
from potluck.texts.batch import Example
from potluck.texts.collate import collate
from potluck.texts.order import micro_batches

Emit = Callable[[Event], None]

_TIMEOUT_S = 600.0
_MANY_STEPS = 1000


def run_rank(spec: RankSpec, commands: Iterator[dict[str, Any]], emit: Emit) -> None:
    """Measure this device once, or take a step each time that it is told to, until no more commands come.

    Raises:
        DeviceLost: another rank ended.
        PotluckError: a loss was not finite.
    """
    torch.set_num_threads(1)
    if spec.task == "measure":
        _measure(spec, emit)
        for _ in commands:
            pass  # ended when it is told to, so that its end is not taken for a failure
    else:
        _train(spec, commands, emit)


def examples_of(step: int, rows: int, length: int, vocab_rows: int, *, classes: bool = False) -> list[Example]:
    """The examples of a step, alike for every strategy: random ids in rows of ``length``.

    All but the first are targets; or each row has one of two classes, read at its first position.
    """
    generator = torch.Generator().manual_seed(step)
    ids_BS = torch.randint(vocab_rows, (rows, length), generator=generator)
    if classes:
        none = (False,) * length
        return [
            Example(tuple(ids), none, f"row {row}", length, None, label=row % 2, reads_at=0)
            for row, ids in enumerate(ids_BS.tolist())
        ]
    supervised = (False, *(True,) * (length - 1))
    return [Example(tuple(ids), supervised, f"row {row}", 0, None) for row, ids in enumerate(ids_BS.tolist())]


def _comm(spec: RankSpec, job: Job) -> tuple[Comm, Pace | None]:
    group, pace = None, None
    if spec.world_size > 1:
        store = FileStore(spec.store, spec.world_size)
        group = gloo_group(store, spec.rank, spec.world_size, spec.address, timeout_s=_TIMEOUT_S)
    if spec.pace is not None:
        come_first()
        pace = Pace(spec.pace)
    return Comm(group, wire=torch_dtype(job.wire), pace=pace), pace


def _measure(spec: RankSpec, emit: Emit) -> None:
    """A profile with the link, of this device while all others measure themselves too."""
    job, work = Job.model_validate(spec.job), Work.model_validate(spec.work)
    comm, pace = _comm(spec, job)
    comm.all_reduce(torch.zeros(1)).wait()
    start = time.perf_counter()
    profile = measure(work, device=spec.device, threads=1, pace=pace, cache=Path(spec.cache), fresh=True)
    profile = profile.model_copy(update={"link": measure_link(comm, message_bytes(work, job.wire))})
    took_s = time.perf_counter() - start
    emit({"event": "profile", "profile": profile.model_dump(mode="json"), "took_s": took_s})


def _train(spec: RankSpec, commands: Iterator[dict[str, Any]], emit: Emit) -> None:
    job, plan = Job.model_validate(spec.job), Plan.from_json(spec.plan)
    work = Work.model_validate(spec.work)
    decoder = decoder_for(Fields(work.config), job)
    part = part_for(
        plan,
        spec.rank,
        RandomWeights(decoder),
        decoder,
        compute=torch_dtype(job.dtype),
        adapter=job.adapter,
        seed=job.seed,
    )
    trim()
    comm, pace = _comm(spec, job)
    together = Comm(comm.group, pace=pace)
    settings = settings_of(job, _MANY_STEPS)
    stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
    emit({"event": "ready", "weight_bytes": part.weight_bytes})
    stalls = Stalls()
    for command in commands:
        examples = examples_of(command["step"], job.batch_size, work.length, decoder.vocab_size, classes=work.sequence)
        parts = micro_batches(range(len(examples)), rows_dealt_at_once(plan) or job.batch_size)
        batches = [collate([examples[i] for i in part]) for part in parts]
        together.all_reduce(torch.zeros(1)).wait()  # all begin together
        stalls.ratio()
        before = _used()
        report = stepper.step([Turn(OWNER, batches if spec.rank == OWNER else None)])
        cpu_s, thread_s, switches = (now - then for now, then in zip(_used(), before, strict=True))
        emit(
            {
                "event": "stepped",
                "step_s": report.step_s,
                "loss": report.loss,
                "devices": [asdict(device) for device in report.devices],
                "bytes_sent": report.bytes_sent,
                "cpu_s": cpu_s,
                "thread_s": thread_s,
                "context_switches": int(switches),
                "stall_ratio": stalls.ratio(),
                "peak_rss_mib": memory_mib("VmHWM"),
            }
        )


def _used() -> tuple[float, float, float]:
    """CPU seconds of this process and of this thread, and its context switches, so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return time.process_time(), time.thread_time(), usage.ru_nvcsw + usage.ru_nivcsw
