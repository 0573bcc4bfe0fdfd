"""Every strategy on the same emulated devices, its steps taken in turn with the others', top to bottom."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from transformers import PretrainedConfig

from potluck import testbed
from potluck.bench.pool_hosts import Hosts, hosts_of
from potluck.bench.pool_plans import (
    LIMIT,
    OPTIMUM,
    STRATEGIES,
    TENSOR,
    Entry,
    Planned,
    alone_unslowed,
    job_of,
    plan_all,
    work_of_rows,
)
from potluck.bench.pool_result import ratios_of, recovered, row_of
from potluck.bench.pool_run import OnStep, Step, measure_all, needed_bytes, run_sitting, steps_of
from potluck.bench.pool_sets import model_bytes, shape_of, speeds_of
from potluck.bench.pool_sittings import Sittings, arrange
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import decoder_for
from potluck.models.families.decoder import Decoder
from potluck.pool.machine import usable_cores
from potluck.pool.profile import Profile, Work
from potluck.testbed.calibrate import TOLERANCE
from potluck.testbed.state import DEFAULT_PREFIX, Testbed, state_file

METHOD = (
    "Devices are network namespaces on one machine. Each computes on one thread, and before each message sleeps until"
    " its thread's CPU seconds, divided by its speed, have passed; what it takes to send a message is not slowed."
    " Strategies take their steps in turn on the same batches; step_s is the median after one step of warm-up."
)


@dataclass(frozen=True)
class Comparison:
    """What is compared, and on what."""

    set: str = "A"
    shape: str = "llama-1b"
    layers: int | None = None
    """The shape's first blocks; all if left out."""
    train: str = "lora"
    dtype: str = "fp32"
    steps: int = 6
    rows: int = 8
    """Of each step."""
    length: int = 128
    """Tokens of each row."""
    load: float = 1.5
    """Cores that all devices together compute on; messages need the rest."""
    mbit: float = 1000.0
    """Of each device's link, in each direction."""
    strategies: tuple[str, ...] = STRATEGIES
    calibrate_s: float = 5.0
    prefix: str = DEFAULT_PREFIX
    """Of the testbed's names."""


def compare(
    comparison: Comparison,
    *,
    tell: Callable[[str], None] = lambda text: None,
    on_step: OnStep = lambda name, done, total: None,
) -> dict[str, Any]:
    """Bring a testbed up, measure, plan, run everything, and take the testbed down whatever happens.

    Args:
        comparison: what and on what.
        tell: told what goes on, in sentences.
        on_step: told each step.

    Returns:
        Plain values for JSON: ``strategies`` has a row each, in the order they were asked for.

    Raises:
        BadInput: a name or a number cannot be used, a testbed is up, or memory is short.
        PotluckError: a device ended.
    """
    job, config, decoder, speeds = _checked(comparison)
    work = work_of_rows(job, config, comparison.length)
    with (
        _testbed(comparison, speeds) as bed,
        tempfile.TemporaryDirectory(prefix="potluck-bench-") as directory,
    ):
        scratch = Path(directory)
        calibration = _calibrated(bed, comparison.calibrate_s, tell)
        tell("Starting a process on each device.")
        with hosts_of(bed, scratch) as hosts:
            tell("Measuring all devices.")
            first, took_s = measure_all(hosts, job.model_dump(mode="json"), work, scratch)
            second = None
            if OPTIMUM in comparison.strategies:
                tell("Measuring all devices again, for the optimum of other measurements.")
                second, _ = measure_all(hosts, job.model_dump(mode="json"), work, scratch)
            planned = plan_all(job, decoder, work, first, second, comparison.strategies)
            entries, sittings = _arranged(hosts, job, decoder, work, first, planned)
            left_out = planned.left_out | sittings.left_out
            for name, why in left_out.items():
                tell(f"{name} is left out: {why}")
            if len(sittings.together) > 1:
                listed = "; ".join(", ".join(names) for names in sittings.together)
                tell(f"Memory does not hold all at once, so that these run together: {listed}.")
            ran = [
                run_sitting(hosts, [entries[n] for n in names], work, comparison.steps, sitting=i, on_step=on_step)
                for i, names in enumerate(sittings.together)
            ]
    steps = steps_of(ran)
    alone = [step.ranks[0]["cpu_s"] for step in steps.pop(LIMIT, [])]
    return {
        **_given(comparison),
        "speeds": [device.speed for device in bed.devices],
        "cores": usable_cores(),
        "method": METHOD,
        "calibration": calibration,
        "profile_s": took_s,
        "link": None if first[0].link is None else first[0].link.model_dump(),
        "single_cpu_s": median(alone) if alone else None,
        "limit_s": median(alone) / sum(device.speed for device in bed.devices) if alone else None,
        **_compared(comparison, entries, steps, planned.auto),
        "auto": planned.auto,
        "left_out": left_out,
        "sittings": sittings.together,
    }


def _compared(
    comparison: Comparison, entries: dict[str, Entry], steps: dict[str, list[Step]], auto: dict[str, str]
) -> dict[str, Any]:
    tokens = comparison.rows * comparison.length
    rows = [row_of(entries[name], taken, tokens) for name, taken in steps.items()]
    order = [*comparison.strategies, *auto.values()]
    rows.sort(key=lambda row: order.index(row["strategy"]))
    return {
        "strategies": rows,
        "ratios": ratios_of(steps, auto),
        "recovered": recovered(rows),
        "prediction_error": sum(abs(row["prediction_error"]) for row in rows) / len(rows) if rows else None,
    }


def _given(comparison: Comparison) -> dict[str, Any]:
    names = ("set", "shape", "layers", "train", "dtype", "steps", "rows", "length", "load", "mbit")
    return {name: getattr(comparison, name) for name in names}


def _checked(comparison: Comparison) -> tuple[Job, PretrainedConfig, Decoder, list[float]]:
    """The job of all strategies, its model's config and description, and the devices' speeds.

    Raises:
        BadInput: something cannot be used.
    """
    shape = shape_of(comparison.shape, comparison.layers)
    speeds = speeds_of(comparison.set, comparison.load, usable_cores())
    for name in comparison.strategies:
        if name not in STRATEGIES:
            raise BadInput(f"--strategies: there is no '{name}'; there are {', '.join(STRATEGIES)}.")
    if not comparison.strategies:
        raise BadInput(f"--strategies: name at least one of {', '.join(STRATEGIES)}.")
    if comparison.train not in ("lora", "full"):
        raise BadInput(f"--train: '{comparison.train}' is neither lora nor full.")
    if comparison.dtype not in ("fp32", "bf16"):
        raise BadInput(f"--dtype: '{comparison.dtype}' is neither fp32 nor bf16.")
    if comparison.rows < 2 or comparison.rows % 2:
        raise BadInput(f"--rows: a step has an even number of rows, so that it has two halves; not {comparison.rows}.")
    config = shape.config(comparison.layers)
    job = job_of(train=comparison.train, dtype=comparison.dtype, rows=comparison.rows, task=shape.task)
    decoder = decoder_for(config, job)
    if not 2 <= comparison.length <= decoder.max_positions:
        raise BadInput(f"--length: a row has 2 to {decoder.max_positions} tokens, not {comparison.length}.")
    if comparison.steps < 1:
        raise BadInput(f"--steps: at least one, not {comparison.steps}.")
    if not 1 <= comparison.mbit <= 1e6:
        raise BadInput(f"--mbit: a link has 1 to 1,000,000 Mbit/s, not {comparison.mbit:g}.")
    needed, available = (
        model_bytes(decoder, comparison.train, comparison.dtype),
        psutil.virtual_memory().available,
    )
    if needed > available:
        raise BadInput(
            f"{comparison.shape} with {len(decoder.layers)} blocks needs {needed / 2**30:.1f} GiB for --train"
            f" {comparison.train} however it is shared, and {available / 2**30:.1f} GiB are available on this machine:"
            " take fewer --layers."
        )
    if os.geteuid() == 0 and state_file(comparison.prefix).exists():
        option = "" if comparison.prefix == DEFAULT_PREFIX else f" --prefix {comparison.prefix}"
        raise BadInput(f"A testbed is up already: 'potluck testbed down{option}' removes it.")
    return job, config, decoder, speeds


@contextmanager
def _testbed(comparison: Comparison, speeds: list[float]) -> Iterator[Testbed]:
    load = comparison.load / usable_cores()
    bed = testbed.up(speeds, round(comparison.mbit * 1e6), load=load, prefix=comparison.prefix)
    try:
        yield bed
    finally:
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one Ctrl-C has come; another would leave half a testbed
        try:
            testbed.down(comparison.prefix)
        finally:
            signal.signal(signal.SIGINT, before)


def _calibrated(bed: Testbed, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    tell(f"Calibrating {len(bed.devices)} devices.")
    found = testbed.calibrate(bed, seconds=seconds, tolerance=None)
    for each in found:
        tell(f"  {each.name}: speed {each.speed:.3f}, achieved {each.achieved:.3f} ({each.error:+.1%})")
    if off := [each.name for each in found if abs(each.error) > TOLERANCE]:
        tell(
            f"Warning: {', '.join(off)} is more than {TOLERANCE:.0%} off its speed: what follows says little. End what"
            " else this machine does, or take a lower --load."
        )
    return {
        "seconds": seconds,
        "tolerance": TOLERANCE,
        "within": not off,
        "devices": [
            {"name": each.name, "speed": each.speed, "achieved": each.achieved, "error": each.error} for each in found
        ],
    }


def _arranged(
    hosts: Hosts, job: Job, decoder: Decoder, work: Work, profiles: list[Profile], planned: Planned
) -> tuple[dict[str, Entry], Sittings]:
    """All that runs, and what runs together; the limit beside the first.

    Raises:
        BadInput: nothing fits.
    """
    entries = {entry.name: entry for entry in planned.entries}
    entries[LIMIT] = alone_unslowed(job, decoder, work, profiles)
    first = [TENSOR] if TENSOR in entries else []
    names = [*first, *(name for name in entries if name not in first)]
    needed = {name: needed_bytes(entries[name], hosts.imported_bytes) for name in names}
    sittings = arrange(needed, psutil.virtual_memory().available)
    if not any(name != LIMIT for together in sittings.together for name in together):
        reasons = planned.left_out | sittings.left_out
        raise BadInput("No strategy can be carried out. " + " ".join(f"{name}: {why}" for name, why in reasons.items()))
    return entries, sittings
