"""What came of ``bench pool`` as tables of 80 columns."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from potluck.bench.table import rounded


def pool_table(result: Mapping[str, Any]) -> Table:
    """Every strategy's step, what it waits and sends, its memory, and what was predicted.

    Args:
        result: the JSON of ``bench pool``.
    """
    layers = "" if result["layers"] is None else f", {result['layers']} blocks"
    table = Table(
        title=f"Set {result['set']}, {result['shape']}{layers}, {result['train']}, {result['dtype']},"
        f" {result['rows']} x {result['length']} tokens a step",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    stalls = any(row["stall_ratio"] is not None for row in result["strategies"])
    table.add_column("strategy", overflow="fold", min_width=19)
    headings = ["step\ns", "tokens\n/s", "idle", *(["stall"] if stalls else []), "swit-\nches"]
    for heading in [*headings, "sent\nMB", "peak\nMiB", "pre-\ndicted"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["strategies"]:
        table.add_row(
            f"{row['strategy']}\n  {_how(row)}",
            f"{_seconds(row['step_s'])}\n{_seconds(row['step_s_min'])}-{_seconds(row['step_s_max'])}",
            rounded(row["tokens_per_s"]),
            f"{row['idle_ratio']:.1%}",
            *([_percent(row["stall_ratio"])] if stalls else []),
            f"{row['context_switches']:,.0f}",
            rounded(row["bytes_per_device"] / 1e6),
            f"{row['peak_rss_mib']:,.0f}",
            f"{_seconds(row['predicted_step_s'])}\n{row['prediction_error']:+.1%}",
        )
    return table


def ratio_table(result: Mapping[str, Any]) -> Table:
    """Whose steps are shorter than whose, and by how much."""
    table = Table(title="Step time against that of another", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("strategy", overflow="fold")
    table.add_column("against", overflow="fold")
    table.add_column("by", justify="right", no_wrap=True)
    table.add_column("step by step", justify="right", no_wrap=True)
    for ratio in result["ratios"]:
        spread = "not in turn" if ratio["min"] is None else f"{ratio['min'] - 1:+.1%} to {ratio['max'] - 1:+.1%}"
        table.add_row(ratio["strategy"], ratio["against"], f"{ratio['ratio'] - 1:+.1%}", spread)
    return table


def sentences(result: Mapping[str, Any]) -> list[str]:
    """What the tables do not say."""
    said = []
    if result["limit_s"] and result["strategies"]:
        best = min(result["strategies"], key=lambda row: float(row["step_s"]))
        said.append(
            f"One process alone computes {_seconds(result['single_cpu_s'])} s a step, which at the speeds of all"
            f" devices together is {_seconds(result['limit_s'])} s: {best['strategy']} reaches"
            f" {result['limit_s'] / best['step_s']:.0%} of that."
        )
    gained = result["recovered"]
    if gained is not None:
        said.append(
            f"Of the time between even shares and the optimum of other measurements, tensor gains"
            f" {_percent(gained['measured'])} as that ran, {_percent(gained['computed'])} as it was computed."
        )
    for kind, row in result["auto"].items():
        said.append(f"auto, {'data stay' if kind == 'data_stays' else 'data may move'}: {row}.")
    if result["prediction_error"] is not None:
        said.append(f"Mean absolute error of predictions: {result['prediction_error']:.1%}.")
    said += [f"{name} was left out: {why}" for name, why in result["left_out"].items()]
    said.append("What it takes to send a message is not slowed with the devices.")
    return said


def _how(row: Mapping[str, Any]) -> str:
    if row["plan"] in ("pipeline", "pipeline-uniform"):
        return f"{row['micro_batch_size']} rows, {row['wire']}"
    if row["plan"] == "data":
        return f"rows, {row['wire']}"
    return f"{'2 halves' if row['half_batches'] == 2 else '1 half'}, {row['wire']}"


def _seconds(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{part:.0%}"
