"""Plans as tables, and as plain values for JSON."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from potluck.pool.candidates import Candidate
from potluck.pool.plan import Plan

_NAMES_WIDTH = 15
"""Characters for the names of devices, so that the table fits into 80 columns."""


def candidates_table(candidates: Sequence[Candidate], chosen: Candidate) -> Table:
    """Every strategy's predicted step, waiting and memory, and how it compares; :func:`impossible` says the rest."""
    table = Table(title="Plans", title_justify="left")
    table.add_column("strategy", no_wrap=True)
    table.add_column("devices")
    for column in ("step", "waiting", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("verdict")
    for c in candidates:
        if c.plan is None or c.prediction is None:
            table.add_row(c.strategy, "", "", "", "", "no")
            continue
        most = max(device.memory_bytes for device in c.prediction.devices)
        numbers = (_seconds(c.prediction.step_s), f"{c.prediction.idle_ratio:.0%}", _mib(most))
        verdict = _verdict(c, chosen)
        names = _names(c.plan)
        table.add_row(c.strategy, names, *numbers, verdict if c.proven else f"{verdict} (search was cut short)")
    return table


def impossible(candidates: Sequence[Candidate]) -> list[str]:
    """A sentence for each plan that cannot be carried out, which says why not."""
    return [f"{_called(c)} is not possible: {c.reason}" for c in candidates if not c.feasible]


def predicted_table(candidate: Candidate) -> Table:
    """Who holds what in one plan, and how long each device would compute and wait in a step."""
    table = Table(title=f"Who would hold what ({candidate.strategy})", title_justify="left")
    table.add_column("device", overflow="fold")
    for column in (
        "query\nheads",
        "MLP\ncolumns",
        "vocab\nrows",
        "memory",
        "of\nfree",
        "compute",
        "wait",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    if candidate.plan is not None and candidate.prediction is not None:
        for share, device in zip(candidate.plan.devices, candidate.prediction.devices, strict=True):
            held = (f"{len(units):,}" for units in (share.heads, share.columns, share.vocab_rows))
            part = device.memory_bytes / max(device.available_bytes, 1)
            times = (_seconds(device.compute_s), _seconds(device.wait_s))
            table.add_row(share.name, *held, _mib(device.memory_bytes), f"{part:.0%}", *times)
    return table


def _names(plan: Plan) -> str:
    names = ", ".join(device.name for device in plan.devices)
    return names if len(names) <= _NAMES_WIDTH or len(plan.devices) == 1 else f"{len(plan.devices)} devices"


def _called(c: Candidate) -> str:
    return f"{c.strategy} on {c.plan.devices[0].name}" if c.plan and len(c.plan.devices) == 1 else c.strategy


def _verdict(c: Candidate, chosen: Candidate) -> str:
    if c is chosen:
        return "best"
    if not c.feasible or c.prediction is None or chosen.prediction is None:
        return "no"
    ratio = c.prediction.step_s / chosen.prediction.step_s
    return f"{ratio:.1f}x" if ratio >= 2 else f"{ratio - 1:+.0%}"


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"


def _seconds(time_s: float) -> str:
    """At most seven characters, down to tenths of a millisecond."""
    if 5e-5 <= time_s < 0.1:
        return f"{time_s * 1e3:.1f} ms"
    return f"{time_s:,.0f} s" if time_s >= 100 else f"{time_s:.2f} s"


def plans_json(
    candidates: Sequence[Candidate], chosen: Candidate, if_data_moved: str | None, notes: Sequence[str]
) -> dict[str, Any]:
    """The machine-readable form of ``potluck plan``; ``step_s`` and ``idle_ratio`` are null where nothing fits."""
    return {
        "best": chosen.strategy,
        "plans": [_candidate_json(c) for c in candidates],
        "if_data_moved": if_data_moved,
        "notes": list(notes),
    }


def _candidate_json(c: Candidate) -> dict[str, Any]:
    devices = []
    if c.plan is not None and c.prediction is not None:
        for share, device in zip(c.plan.devices, c.prediction.devices, strict=True):
            devices.append(
                {
                    "name": share.name,
                    "heads": len(share.heads),
                    "columns": len(share.columns),
                    "vocab_rows": len(share.vocab_rows),
                    "memory_mib": round(device.memory_bytes / 2**20, 1),
                    "compute_s": device.compute_s,
                    "wait_s": device.wait_s,
                }
            )
    return {
        "strategy": c.strategy,
        "feasible": c.feasible,
        "reason": c.reason,
        "step_s": c.prediction.step_s if c.prediction else None,
        "idle_ratio": c.prediction.idle_ratio if c.prediction else None,
        "message_s": c.prediction.message_s if c.prediction else None,
        "devices": devices,
    }
