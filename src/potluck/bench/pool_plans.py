"""What ``bench pool`` compares: a plan of each strategy over all devices of a set, made from their profiles."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.job import Job
from potluck.job_sections import Data, Task
from potluck.models.families.decoder import Decoder
from potluck.models.families.fields import fields_of
from potluck.pool.candidates import Candidate, best, planned, plans, single, tensor_uniform
from potluck.pool.cost import Prediction, Units, predict
from potluck.pool.plan import DeviceShare, Plan, row_devices, stage_devices
from potluck.pool.profile import Line, Profile, Work
from potluck.pool.reasons import missing
from potluck.pool.rows import plan_rows
from potluck.pool.search import search
from potluck.pool.stages import best_stages, even_stages
from potluck.pool.task import task_of

TENSOR, TENSOR_FP32 = "tensor", "tensor-fp32"
UNIFORM, UNIFORM_SYNC = "tensor-uniform", "tensor-uniform-sync"
PIPELINE, PIPELINE_UNIFORM, DATA, OPTIMUM, AUTO = "pipeline", "pipeline-uniform", "data", "optimum", "auto"
STRATEGIES = (TENSOR, TENSOR_FP32, UNIFORM, UNIFORM_SYNC, PIPELINE, PIPELINE_UNIFORM, DATA, OPTIMUM, AUTO)
"""``tensor-fp32``: the shares of ``tensor``, with messages in float32; ``optimum``: ``tensor`` planned from profiles of
their own; ``auto``: what a job would choose, if that is none of the others."""

LIMIT = "limit"
"""One process alone that is not slowed, beside the strategies."""
HALVES = 2


@dataclass(frozen=True)
class Entry:
    """One row of the comparison."""

    name: str
    plan: Plan
    prediction: Prediction
    job: Job
    """By whose half-batches and wire it runs."""

    @property
    def devices(self) -> list[str]:
        """Names in the order of ranks."""
        return [device.name for device in self.plan.devices]


@dataclass(frozen=True)
class Planned:
    """All rows, and what each choice of ``auto`` is called."""

    entries: tuple[Entry, ...]
    left_out: dict[str, str]
    """What is not run, and why."""
    auto: dict[str, str]
    """For ``data_stays`` and ``data_moves`` the row of the plan that ``auto`` chooses."""


def job_of(*, train: str, dtype: str, rows: int, task: Task = "causal-lm") -> Job:
    """The job of all rows: two half-batches, messages in bfloat16, data that may move; classes, if any, are two."""
    return Job.model_validate(
        {
            "model": "-",
            "task": task,
            "data": Data(train=["-"], labels=["0", "1"] if task == "sequence-classification" else []),
            "output": Path("-"),
            "train": train,
            "dtype": dtype,
            "batch_size": rows,
            "half_batches": HALVES,
            "wire": "bf16",
            "data_stays": False,
            "learning_rate": 1e-4,
            "schedule": "constant",
            "warmup": 0.0,
        }
    )


def work_of_rows(job: Job, config: PretrainedConfig, length: int) -> Work:
    """A half-batch of the job: rows of ``length`` tokens, of which all but the first are targets, or a class each."""
    rows = -(-job.batch_size // HALVES)
    sequence = job.task != "causal-lm"
    assert job.dtype != "auto"
    return Work(
        config=fields_of(config),
        rows=rows,
        length=length,
        supervised=rows if sequence else rows * (length - 1),
        longest=length,
        dtype=job.dtype,
        train=job.train,
        lora=job.lora,
        ia3=job.ia3,
        checkpointing=job.checkpointing,
        sequence=sequence,
    )


def plan_all(
    job: Job,
    decoder: Decoder,
    work: Work,
    first: Sequence[Profile],
    second: Sequence[Profile] | None,
    wanted: Sequence[str],
) -> Planned:
    """Plan each wanted strategy for all devices of ``first``; one that cannot be carried out is left out, with why.

    Args:
        job: of all rows (:func:`job_of`).
        decoder: the model's description.
        work: what the devices were measured at.
        first: their profiles, coordinator first.
        second: independent profiles of the same devices, for ``optimum``; None where that is not wanted.
        wanted: names out of ``STRATEGIES``.
    """
    entries: list[Entry] = []
    left_out: dict[str, str] = {}
    makers: dict[str, Callable[[], Entry]] = {
        TENSOR: lambda: tensor_of_all(job, decoder, work, first, TENSOR),
        TENSOR_FP32: lambda: _in_fp32(job, decoder, work, first),
        UNIFORM: lambda: _uniform(job, decoder, work, first),
        UNIFORM_SYNC: lambda: _uniform_sync(job, decoder, work, first),
        PIPELINE: lambda: _pipeline(job, decoder, work, first, PIPELINE),
        PIPELINE_UNIFORM: lambda: _pipeline(job, decoder, work, first, PIPELINE_UNIFORM),
        DATA: lambda: _data(job, decoder, work, first),
        OPTIMUM: lambda: tensor_of_all(job, decoder, work, second or first, OPTIMUM),
    }
    for name in wanted:
        if name in makers:
            try:
                entry = makers[name]()
            except BadInput as error:
                left_out[name] = str(error)
                continue
            if short := missing(entry.prediction):
                left_out[name] = short
            else:
                entries.append(entry)
    auto: dict[str, str] = {}
    if AUTO in wanted:
        for kind, stays in (("data_stays", True), ("data_moves", False)):
            asked = job.model_copy(update={"data_stays": stays})
            try:
                entry = _entry(f"{AUTO}, {kind}", best(plans(asked, decoder, work, first)), asked)
            except BadInput as error:
                left_out[f"{AUTO}, {kind}"] = str(error)
                continue
            same = next((each for each in entries if each.name != OPTIMUM and _alike(each, entry)), None)
            auto[kind] = entry.name if same is None else same.name
            if same is None:
                entries.append(entry)
    return Planned(tuple(entries), left_out, auto)


def tensor_of_all(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], name: str) -> Entry:
    """The best shares of all devices together, also where fewer would be faster."""
    task = task_of(job, decoder, work)
    found = search(task, profiles, [profile.device for profile in profiles])
    return Entry(name, *planned(task, TENSOR, profiles, found.units, ()), job)


def alone_unslowed(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile]) -> Entry:
    """The first device with everything, to run as fast as a core is: what others' steps are held against."""
    return _entry(LIMIT, single(task_of(job, decoder, work), profiles[0], [profiles[0].device]), job)


def in_more_rows(profile: Profile, times: int) -> Profile:
    """A profile as it would be of ``times`` as many rows: seconds and kept bytes grow with rows."""

    def grown(line: Line) -> Line:
        points = tuple((units, value * times) for units, value in line.points)
        return Line(alpha=line.alpha * times, beta=line.beta * times, points=points)

    lines = ("attention_s", "mlp_s", "head_s", "attention_bytes", "mlp_bytes")
    work = profile.work
    more = work.model_copy(update={"rows": work.rows * times, "supervised": work.supervised * times})
    one = None if profile.one_row_part is None else profile.one_row_part / times
    return profile.model_copy(
        update={"work": more, "one_row_part": one, **{name: grown(getattr(profile, name)) for name in lines}}
    )


def _in_fp32(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile]) -> Entry:
    """The shares of ``tensor``, with messages in float32."""
    plan, exact = tensor_of_all(job, decoder, work, profiles, TENSOR).plan, job.model_copy(update={"wire": "fp32"})
    return Entry(TENSOR_FP32, plan, predict(task_of(exact, decoder, work), profiles, _units(plan)), exact)


def _units(plan: Plan) -> list[Units]:
    return [Units(len(d.heads), len(d.columns), len(d.vocab_rows)) for d in plan.devices]


def _uniform(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile]) -> Entry:
    return _entry(UNIFORM, tensor_uniform(task_of(job, decoder, work), profiles, [profiles[0].device]), job)


def _uniform_sync(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile]) -> Entry:
    """Even shares, the whole batch at once, and each message waited for in float32: as Megatron-LM does."""
    plan = _uniform(job, decoder, work, profiles).plan
    synchronous = job.model_copy(update={"half_batches": 1, "wire": "fp32"})
    more = [in_more_rows(profile, HALVES) for profile in profiles]
    prediction = predict(task_of(synchronous, decoder, more[0].work), more, _units(plan))
    return Entry(UNIFORM_SYNC, plan, prediction, synchronous)


def _pipeline(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], name: str) -> Entry:
    """The best, or even, stages of all devices.

    Raises:
        BadInput: there are more devices than links or micro-batches.
    """
    if name == PIPELINE_UNIFORM:
        found = even_stages(job, decoder, work, profiles)
    else:
        found = best_stages(job, decoder, work, profiles, at_least=len(profiles))
    links = {stage.device: Ranges.of(stage.start, stage.stop) for stage in found.stages}
    devices = stage_devices(decoder, [p.device for p in profiles], [links[i] for i in range(len(profiles))])
    return _of_whole_links(name, devices, found.prediction, job, found.micro_batch_size)


def _data(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile]) -> Entry:
    found = plan_rows(task_of(job, decoder, work), profiles, job.batch_size)
    devices = row_devices(decoder, [p.device for p in profiles], found.speeds)
    return _of_whole_links(DATA, devices, found.prediction, job, found.micro_batch_size)


def _of_whole_links(
    name: str, devices: tuple[DeviceShare, ...], prediction: Prediction, job: Job, micro_batch_size: int
) -> Entry:
    plan = Plan(name, devices, prediction.step_s, prediction.idle_ratio, micro_batch_size=micro_batch_size)
    return Entry(name, plan, prediction, job)


def _entry(name: str, candidate: Candidate, job: Job) -> Entry:
    assert candidate.plan is not None
    assert candidate.prediction is not None
    return Entry(name, candidate.plan, candidate.prediction, job)


def _alike(one: Entry, other: Entry) -> bool:
    """Whether the same devices would do the same work, and send it in the same way."""

    def work_of(entry: Entry) -> tuple[object, ...]:
        plan, job = entry.plan, entry.job
        return plan.strategy, plan.devices, plan.micro_batch_size, job.half_batches, job.wire

    return work_of(one) == work_of(other)
