"""The schemes of a comparison as a table of 80 columns, and what each is called."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

Scheme = Mapping[str, Any]
"""One entry of ``schemes`` in the JSON of ``bench split``."""


def scheme_table(result: Mapping[str, Any]) -> Table:
    """Quality, bytes, seconds and memory of each scheme; a dash where a scheme has no such thing.

    Args:
        result: the JSON of ``bench split``. Seconds and memory of clients may be one number or one a client; the
            table shows the largest.
    """
    links = result.get("link_mbit")
    speeds = links if isinstance(links, Sequence) else [links] if links else []
    at = f", clients at {' and '.join(f'{speed:g}' for speed in speeds)} Mbit/s" if speeds else ""
    table = Table(
        title=f"Task '{result['task']}'{at}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    table.add_column("scheme", overflow="fold", min_width=17)
    headings = ("held-out\nloss", "accu-\nracy", "up\nMB", "down\nMB", "active\ns", "memory\nMiB", "server\ns")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["schemes"]:
        table.add_row(
            "\n".join((row["scheme"], *_details(row))),
            _number(row.get("eval_loss"), ".4f"),
            _number(row.get("eval_accuracy"), ".3f"),
            *(_megabytes(row.get(way)) for way in ("bytes_up", "bytes_down")),
            rounded(largest(row.get("client_active_s"))),
            rounded(largest(row.get("client_peak_rss_mib"))),
            rounded(row.get("server_s")),
        )
    return table


def name_of(row: Scheme) -> str:
    """What a scheme is called: its name and what tells it from others of that name."""
    return ", ".join((row["scheme"], *_details(row)))


def largest(value: object) -> float | None:
    """The largest of one number, or of a list or mapping of such; None if there is none."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, Sequence) and not isinstance(value, str):
        numbers = [number for number in map(largest, value) if number is not None]
        return max(numbers) if numbers else None
    return float(value) if isinstance(value, int | float) else None


def rounded(value: float | None) -> str:
    """Three digits, or all that stand before the point."""
    if value is None:
        return "-"
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _details(row: Scheme) -> list[str]:
    """``trainable, int8`` and ``embeddings + 4096``: what a scheme's row says of its settings."""
    settings = [row[key] for key in ("client", "encoding") if row.get(key)]
    targets, negatives = row.get("targets"), row.get("negatives")
    table = f"{targets} + {negatives}" if targets == "embeddings" and negatives is not None else targets
    return [part for part in (", ".join(settings), table) if part]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _megabytes(value: float | None) -> str:
    return "-" if value is None else rounded(value / 1e6)
