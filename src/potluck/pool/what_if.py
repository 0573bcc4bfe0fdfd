"""Plans from profile files alone: no network, no training, and the machines need not be here."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import decoder_for, decoder_of, read_config
from potluck.models.families.decoder import Decoder
from potluck.models.families.fields import config_from
from potluck.pool.candidates import Candidate, best, if_data_moved, plans
from potluck.pool.profile import Link, Profile, Work, read_profile
from potluck.texts.task_rows import read_for

DEFAULT_LINK, DEFAULT_LATENCY = "1gbit", "0.3ms"
_OF_THE_WIRE = 0.94  # what Ethernet, IP and TCP headers leave of it
_BITS = {"gbit": 1e9, "mbit": 1e6}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True)
class WhatIf:
    """What came of it."""

    profiles: tuple[Profile, ...]
    candidates: tuple[Candidate, ...]
    best: Candidate
    if_data_moved: str | None
    notes: tuple[str, ...]
    """What was assumed, in sentences."""


def what_if(job: Job, files: Sequence[Path], *, link: str | None = None, latency: str | None = None) -> WhatIf:
    """Plan a job for the devices that profiles describe; the first is the coordinator and has the data.

    Args:
        job: the job; its strategy decides which plan is the best.
        files: profiles, the same file several times for several such devices.
        link: rate between devices, such as ``1gbit`` or ``100mbit``; what profiles say, or 1gbit, if left out.
        latency: of a message, such as ``0.3ms``; 0.3ms if left out.

    Raises:
        BadInput: a file is no profile, belongs to another job, model or version, or two devices have one name; the
            link cannot be read; or no plan fits.
    """
    if not files:
        raise BadInput("Name at least one profile: --profiles FILE [FILE ...]. 'potluck profile' writes them.")
    given = parse_link(link, latency) if link is not None or latency is not None else None
    profiles = read_profiles(files)
    check_job(job, profiles[0].work, str(files[0]))
    profiles, notes = _linked(profiles, given)
    decoder = decoder_for(config_from(profiles[0].work.config), job)
    if job.dtype == "auto":
        notes.append(f"dtype: {profiles[0].work.dtype}, as the profiles were measured.")
    candidates = plans(job, decoder, profiles[0].work, profiles)
    chosen = best(candidates, job.strategy)
    moved = None
    if job.data_stays:
        moved = if_data_moved(job, decoder, profiles[0].work, profiles, (), chosen, candidates)
    return WhatIf(tuple(profiles), tuple(candidates), chosen, moved, tuple(notes))


def read_profiles(files: Sequence[Path]) -> list[Profile]:
    """Read profiles that can be planned together; a file given n times becomes devices ``name-1`` to ``name-n``.

    Raises:
        BadInput: one is no profile, they were measured at different work, or two files name the same device.
    """
    times = Counter(file.resolve() for file in files)
    so_far: Counter[Path] = Counter()
    taken: dict[str, Path] = {}
    profiles: list[Profile] = []
    for file in files:
        profile = read_profile(file)
        so_far[file.resolve()] += 1
        if times[file.resolve()] > 1:
            profile = profile.model_copy(update={"device": f"{profile.device}-{so_far[file.resolve()]}"})
        if profile.device in taken:
            raise BadInput(
                f"{taken[profile.device]} and {file} are both of a device named {profile.device}: measure one of them "
                "again under another name ('potluck profile --name'), or give one file twice."
            )
        taken[profile.device] = file
        if profiles and (difference := work_difference(profile.work, profiles[0].work)):
            raise BadInput(
                f"{file} was measured at other work than {files[0]}: {difference}. Measure it again with "
                f"'potluck profile --like {files[0]}'."
            )
        profiles.append(profile)
    return profiles


def work_difference(work: Work, other: Work) -> str:
    """The first thing in which two works differ, as ``what: this, not that``; empty if they are equal."""
    for name in Work.model_fields:
        mine, theirs = getattr(work, name), getattr(other, name)
        if mine == theirs:
            continue
        if name == "config":
            keys = [key for key in sorted({*mine, *theirs}) if mine.get(key) != theirs.get(key)]
            return f"the model's {keys[0]}: {mine.get(keys[0])!r}, not {theirs.get(keys[0])!r}"
        return f"{name}: {mine}, not {theirs}"
    return ""


def check_job(job: Job, work: Work, where: str) -> None:
    """See whether a profile was measured for this job; the model is compared where it is a directory at hand.

    Raises:
        BadInput: it was not (says what differs).
    """
    wanted: dict[str, object] = {
        "train": job.train,
        "checkpointing": job.checkpointing,
        "optimizer": job.optimizer,
        "a head of whole sequences": job.task != "causal-lm",
        "rows of a half-batch": _half_batch_rows(job, work.rows),
        **({job.train: job.adapter} if job.adapter is not None else {}),
        **({"dtype": job.dtype} if job.dtype != "auto" else {}),
    }
    measured: dict[str, object] = work.model_dump(include={"train", "checkpointing", "optimizer", "dtype"})
    measured |= {"lora": work.lora, "ia3": work.ia3}
    measured |= {"rows of a half-batch": work.rows, "a head of whole sequences": work.sequence}
    for name, value in wanted.items():
        if measured[name] != value:
            raise BadInput(
                f"{where} was measured for another job: {name}: {measured[name]}, and this job has {value}. Measure "
                "again with 'potluck profile JOB'."
            )
    directory = Path(job.model).expanduser()
    if not directory.is_dir():
        return
    config = read_config(directory)
    here, there = decoder_of(config), decoder_of(config_from(work.config))
    difference = _model_difference(there, here)
    if not difference and work.config.get("model_type") != config.model_type:
        difference = f"model_type: {work.config.get('model_type')}, and {directory} has {config.model_type}"
    if difference:
        raise BadInput(
            f"{where} was measured with another model: {difference}. Measure again with 'potluck profile JOB'."
        )


def _half_batch_rows(job: Job, measured: int) -> int:
    """Rows of the job's half-batch; where fewer were measured, the data may be fewer than a batch, and are counted."""
    micro_rows = min(job.micro_batch_size or job.batch_size, job.batch_size)
    rows = math.ceil(micro_rows / job.half_batches)
    if measured < rows and all(Path(source).is_file() for source in job.data.train):
        rows = math.ceil(
            min(micro_rows, len(read_for(job.task, job.data.train, job.data, others=True))) / job.half_batches
        )
    return rows


def parse_link(link: str | None, latency: str | None) -> Link:
    """A link by its rate (``1gbit``, ``2.5gbit``, ``100mbit``) and the latency of a message (``0.3ms``, ``300us``).

    Of the rate, 94 % are counted: packets have headers.

    Raises:
        BadInput: one of them is written otherwise.
    """
    rate = _measure(DEFAULT_LINK if link is None else link, _BITS)
    if not rate:
        raise BadInput(f"--link: '{link}' is no rate; write it as 1gbit, 2.5gbit or 100mbit.")
    delay = _measure(DEFAULT_LATENCY if latency is None else latency, _SECONDS)
    if delay is None:
        raise BadInput(f"--latency: '{latency}' is no time; write it as 0.3ms, 300us or 0s.")
    return Link(latency_s=delay, bytes_per_s=rate / 8 * _OF_THE_WIRE)


def _measure(text: str, units: dict[str, float]) -> float | None:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
    if found is None or found[2] not in units:
        return None
    return float(found[1]) * units[found[2]]


def _linked(profiles: Sequence[Profile], given: Link | None) -> tuple[list[Profile], list[str]]:
    """Profiles that all have a link, and what was assumed of those that had none."""
    if len(profiles) < 2:
        return list(profiles), []
    without = [p.device for p in profiles if p.link is None]
    link = given or parse_link(None, None)
    linked = [p.model_copy(update={"link": link}) if given or p.link is None else p for p in profiles]
    said = f"{link.bytes_per_s * 8 / _OF_THE_WIRE / 1e6:,.0f} Mbit/s and {link.latency_s * 1e3:g} ms a message"
    if given:
        return linked, [f"Links: {said}, as given."]
    if without:
        return linked, [f"No link was measured for {', '.join(without)}: {said} are assumed; --link says otherwise."]
    return linked, []


def _model_difference(there: Decoder, here: Decoder) -> str:
    names = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size", "vocab_size")
    for name in names:
        if getattr(there, name) != getattr(here, name):
            return f"{name}: {getattr(there, name)}, and the job's model has {getattr(here, name)}"
    if len(there.layers) != len(here.layers):
        return f"layers: {len(there.layers)}, and the job's model has {len(here.layers)}"
    return ""
