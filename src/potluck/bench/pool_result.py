"""What came of ``bench pool``, as plain values for JSON: medians, ratios, and what of the possible was reached."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from potluck.bench.pool_plans import (
    DATA,
    OPTIMUM,
    PIPELINE,
    PIPELINE_UNIFORM,
    TENSOR,
    TENSOR_FP32,
    UNIFORM,
    UNIFORM_SYNC,
    Entry,
)
from potluck.bench.pool_run import Step

COMPARED = (
    (TENSOR, UNIFORM_SYNC),
    (TENSOR, UNIFORM),
    (TENSOR, TENSOR_FP32),
    (TENSOR, PIPELINE),
    (TENSOR, PIPELINE_UNIFORM),
    (TENSOR, DATA),
    (TENSOR, OPTIMUM),
    (PIPELINE, PIPELINE_UNIFORM),
)
"""Whose step time is given as a part of whose."""

_UNITS = ("heads", "columns", "vocab_rows")


def row_of(entry: Entry, steps: Sequence[Step], tokens: int) -> dict[str, Any]:
    """One strategy's row.

    Args:
        entry: what ran.
        steps: its steps, the warm-up left out.
        tokens: of one step.
    """
    step_s = [step.step_s for step in steps]
    devices = [_device_of(entry, rank, steps) for rank in range(len(entry.devices))]
    stalls = [r["stall_ratio"] for step in steps for r in step.ranks if r["stall_ratio"] is not None]
    in_turn = entry.plan.strategy in (PIPELINE, PIPELINE_UNIFORM, DATA)
    return {
        "strategy": entry.name,
        "plan": entry.plan.strategy,
        "half_batches": 1 if in_turn else entry.job.half_batches,
        "micro_batch_size": entry.plan.micro_batch_size,
        "wire": "fp32" if entry.plan.strategy == DATA else entry.job.wire,
        "step_s": median(step_s),
        "step_s_min": min(step_s),
        "step_s_max": max(step_s),
        "steps_s": step_s,
        "tokens_per_s": tokens / median(step_s),
        "idle_ratio": median(_part(step, "wait_s") for step in steps),
        "transfer_ratio": median(_part(step, "transfer_s") for step in steps),
        "stall_ratio": sum(stalls) / len(stalls) if stalls else None,
        "context_switches": sum(device["context_switches"] for device in devices) / len(devices),
        "bytes_per_device": max(device["bytes_sent"] for device in devices),
        "peak_rss_mib": max(device["peak_rss_mib"] for device in devices),
        "predicted_step_s": entry.prediction.step_s,
        "predicted_idle_ratio": entry.prediction.idle_ratio,
        "prediction_error": entry.prediction.step_s / median(step_s) - 1,
        "loss": steps[-1].ranks[0]["loss"],
        "devices": devices,
    }


def ratio_of(steps: Mapping[str, Sequence[Step]], one: str, other: str, through: str) -> dict[str, Any] | None:
    """The step time of ``one`` as a part of that of ``other``, from steps taken one after the other; None if missing.

    Where memory did not hold both at once, each is compared with ``through``, which ran beside either.
    """
    if not steps.get(one) or not steps.get(other):
        return None
    ratios = _paired(steps[one], steps[other])
    if ratios:
        return {
            "strategy": one,
            "against": other,
            "ratio": median(ratios),
            "min": min(ratios),
            "max": max(ratios),
            "pairs": len(ratios),
        }
    between = [_paired(steps[name], steps.get(through, [])) for name in (one, other)]
    if all(between):
        ratio = median(between[0]) / median(between[1])
    else:
        ratio = median(s.step_s for s in steps[one]) / median(s.step_s for s in steps[other])
    return {"strategy": one, "against": other, "ratio": ratio, "min": None, "max": None, "pairs": 0}


def ratios_of(
    steps: Mapping[str, Sequence[Step]], auto: Mapping[str, str], through: str = TENSOR
) -> list[dict[str, Any]]:
    """All ratios of step times that are compared; those of ``auto`` with the row that it chose."""
    found = [ratio_of(steps, one, other, through) for one, other in COMPARED]
    for kind, row in auto.items():
        ratio = {"ratio": 1.0, "min": 1.0, "max": 1.0, "pairs": 0} if row == PIPELINE and steps.get(PIPELINE) else None
        ratio = ratio or ratio_of(steps, row, PIPELINE, through)
        found.append(None if ratio is None else {**ratio, "strategy": f"auto, {kind} ({row})", "against": PIPELINE})
    return [ratio for ratio in found if ratio is not None]


def recovered(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None] | None:
    """What part of the time between even shares and the optimum the plan gains; None where a row is missing.

    ``measured`` takes the optimum's shares as they ran, ``computed`` the time predicted for them, which no shares may
    reach. Each is None where there is no such gap.
    """
    named = {row["strategy"]: row for row in rows}
    if not {TENSOR, UNIFORM, OPTIMUM} <= named.keys():
        return None
    even_s, planned_s = named[UNIFORM]["step_s"], named[TENSOR]["step_s"]

    def part(best_s: float) -> float | None:
        return (even_s - planned_s) / (even_s - best_s) if even_s > best_s else None

    return {"measured": part(named[OPTIMUM]["step_s"]), "computed": part(named[OPTIMUM]["predicted_step_s"])}


def _device_of(entry: Entry, rank: int, steps: Sequence[Step]) -> dict[str, Any]:
    times = [step.devices[rank] for step in steps]
    said = [step.ranks[rank] for step in steps]
    held = entry.plan.devices[rank]
    computed = [each["compute_s"] for each in times]
    return {
        "name": held.name,
        **{kind: median(each[kind] for each in times) for kind in ("compute_s", "wait_s", "transfer_s")},
        "speed": median(each["thread_s"] / c if c > 0 else 0.0 for each, c in zip(said, computed, strict=True)),
        "bytes_sent": median(each["bytes_sent"] for each in said),
        "peak_rss_mib": max(each["peak_rss_mib"] for each in said),
        "context_switches": median(each["context_switches"] for each in said),
        **{unit: len(getattr(held, unit)) for unit in _UNITS},
        "links": None if held.links is None else held.links.spans,
        "rows_part": held.speed / total if (total := sum(d.speed for d in entry.plan.devices)) else None,
    }


def _part(step: Step, kind: str) -> float:
    """Of all devices' time."""
    return sum(device[kind] for device in step.devices) / (len(step.devices) * step.step_s)


def _paired(one: Sequence[Step], other: Sequence[Step]) -> list[float]:
    at = {(step.sitting, step.round): step.step_s for step in other}
    return [s.step_s / at[s.sitting, s.round] for s in one if (s.sitting, s.round) in at]
