"""Where each device's time goes in each strategy, as bars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from potluck.bench.picture import INK, check_suffix, plain, save
from potluck.errors import BadInput

# Told apart by all kinds of colour vision, and in grey (Okabe and Ito).
_PARTS = (("compute_s", "compute", "#0072B2"), ("wait_s", "wait", "#E69F00"), ("transfer_s", "transfer", "#B0B0B0"))
_BAR, _GAP = 0.8, 0.7
_INCHES_A_BAR = 0.26


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the JSON of ``bench pool``: for each strategy a bar a device, split in compute, wait and transfer.

    Args:
        result: the JSON.
        path: .png or .svg; its directory is made.

    Raises:
        BadInput: another suffix, or there is no strategy.
        SaveFailed: the file cannot be written.
    """
    check_suffix(path)
    rows = result["strategies"]
    if not rows:
        raise BadInput("There is nothing to draw: the result has no strategy.")
    bars = sum(len(row["devices"]) for row in rows)
    height = 1.6 + _INCHES_A_BAR * (bars + _GAP * len(rows))
    figure = Figure(figsize=(9, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    plain(axes)
    ratios = ":".join(f"{speed / min(result['speeds']):.3g}" for speed in result["speeds"])
    figure.suptitle(f"{result['shape']}, {result['train']}, devices {ratios}", fontsize=12, color=INK)
    places, names, y = [], [], 0.0
    for row in rows:
        top = y
        for device in row["devices"]:
            left = 0.0
            for key, _, colour in _PARTS:
                axes.barh(y, device[key], left=left, height=_BAR, color=colour, edgecolor="white", linewidth=0.4)
                left += device[key]
            axes.text(left, y, f" {device['name']}", va="center", fontsize=7.5, color=INK)
            y += 1
        places.append((top + y - 1) / 2)
        names.append(f"{row['strategy']}\n{row['step_s']:.3g} s, {row['idle_ratio']:.1%} idle")
        y += _GAP
    axes.set_yticks(places, names, fontsize=9)
    axes.set_ylim(y - _GAP - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("seconds of a step, medians", color=INK)
    for _, name, colour in _PARTS:
        axes.barh(0, 0, color=colour, label=name)
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
    save(figure, path)
