"""Plans as tables, and as plain values for JSON."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from potluck.pool.candidates import Candidate
from potluck.pool.plan import Plan
from potluck.report.holdings import holdings

_NAMES_WIDTH = 11
"""Characters for the names of devices, so that the table fits into 80 columns."""
_NARROW: dict[str, Any] = {"show_edge": False, "pad_edge": False}
_CUT_SHORT = "*"


def candidates_table(candidates: Sequence[Candidate], chosen: Candidate) -> Table:
    """Every strategy's predicted step and what it takes, and how it compares; :func:`impossible` says the rest."""
    cut_short = not all(c.proven or not c.feasible for c in candidates)
    caption = f"{_CUT_SHORT} The search was cut short: there may be a faster one." if cut_short else None
    table = Table(title="Plans", title_justify="left", caption=caption, caption_justify="left", **_NARROW)
    table.add_column("strategy", no_wrap=True)
    table.add_column("devices", overflow="fold")
    for column in ("step", "wait", "most\nMiB", "MB\nsent", "data\nleave", "verdict"):
        table.add_column(column, justify="right", no_wrap=True)
    for c in candidates:
        if c.plan is None or c.prediction is None:
            table.add_row(c.strategy, "", "", "", "", "", "yes" if c.moves_data else "no", "no")
            continue
        most_mib, most_mb = (
            max(getattr(device, amount) for device in c.prediction.devices) / unit
            for amount, unit in (("memory_bytes", 2**20), ("bytes_sent", 1e6))
        )
        numbers = (_seconds(c.prediction.step_s), f"{c.prediction.idle_ratio:.0%}", f"{most_mib:,.0f}", _mb(most_mb))
        verdict = _verdict(c, chosen) + ("" if c.proven or not c.feasible else _CUT_SHORT)
        table.add_row(c.strategy, _names(c.plan), *numbers, "yes" if c.moves_data else "no", verdict)
    return table


def impossible(candidates: Sequence[Candidate]) -> list[str]:
    """What cannot be carried out, with the reason: a sentence for all plans that have it in common."""
    called: dict[str, list[str]] = {}
    for c in candidates:
        if not c.feasible:
            called.setdefault(c.reason, []).append(_called(c))
    return [
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not possible: {reason}"
        for reason, names in called.items()
    ]


def predicted_table(candidate: Candidate) -> Table:
    """Who holds what in one plan, and how long each device would compute and wait in a step."""
    table = Table(title=f"Who would hold what ({candidate.strategy})", title_justify="left")
    table.add_column("device", overflow="fold")
    held = {} if candidate.plan is None else holdings(candidate.plan)
    for column in (*held, "memory", "of\nfree", "compute", "wait"):
        table.add_column(column, justify="right", no_wrap=True)
    if candidate.plan is not None and candidate.prediction is not None:
        for device, *cells in zip(candidate.prediction.devices, *held.values(), strict=True):
            part = device.memory_bytes / max(device.available_bytes, 1)
            times = (_seconds(device.compute_s), _seconds(device.wait_s))
            table.add_row(device.name, *cells, _mib(device.memory_bytes), f"{part:.0%}", *times)
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


def _mb(size_mb: float) -> str:
    return f"{size_mb:.1f}" if 0.05 <= size_mb < 10 else f"{size_mb:,.0f}"


def _seconds(time_s: float) -> str:
    """At most seven characters, down to tenths of a millisecond."""
    if 5e-5 <= time_s < 0.1:
        return f"{time_s * 1e3:.1f} ms"
    return f"{time_s:,.0f} s" if time_s >= 100 else f"{time_s:.2f} s"


def plans_json(
    candidates: Sequence[Candidate], chosen: Candidate, if_data_moved: str | None, notes: Sequence[str]
) -> dict[str, Any]:
    """The machine-readable form of ``potluck plan``; ``step_s`` and ``idle_ratio`` are null where nothing fits.

    ``links`` of a device are ``[first, last + 1]`` in a pipeline, counted as attention and MLP of each block, else
    null; ``bytes_sent`` are those of a step. ``micro_batch_size`` is null where the job's own holds.
    """
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
                    "bytes_sent": round(device.bytes_sent),
                    "links": None if share.links is None else list(share.links.spans[0]),
                    "speed": share.speed,
                }
            )
    return {
        "strategy": c.strategy,
        "feasible": c.feasible,
        "reason": c.reason,
        "step_s": c.prediction.step_s if c.prediction else None,
        "idle_ratio": c.prediction.idle_ratio if c.prediction else None,
        "message_s": c.prediction.message_s if c.prediction else None,
        "moves_data": c.moves_data,
        "micro_batch_size": c.plan.micro_batch_size if c.plan else None,
        "devices": devices,
    }
