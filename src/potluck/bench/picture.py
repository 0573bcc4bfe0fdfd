"""A comparison in one figure: quality against bytes, bytes by kind of message, and seconds of clients."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter
from matplotlib.transforms import Bbox

from potluck.bench.table import Scheme, largest, name_of
from potluck.errors import BadInput, SaveFailed

SUFFIXES = (".png", ".svg")

# Both sets are told apart by all kinds of colour vision: Okabe and Ito's, without yellow, which is pale on white, for
# schemes; Tol's light ones for kinds of message, so that the same colour never means both.
_OF_SCHEME = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#1B1B1B")
_OF_KIND = (
    *("#77AADD", "#EE8866", "#44BB99", "#EEDD88", "#FFAABB"),
    *("#AAAA00", "#99DDFF", "#BBCC33", "#BBBBBB", "#555555"),
)
_TOO_LITTLE = ("control", "manifest", "other")
_OF_LINK = ("#4D4D4D", "#ABABAB")
_MARKERS = ("o", "s", "D", "^", "v", "P")
INK, _FAINT = "#222222", "#DDDDDD"
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
_DISTANCES = (19, 26, 34, 44, 56)  # pixels
_MANY_TICKS = 30.0  # the range of values from which the narrow panel has room for powers of ten only
_ROW_INCHES, _FRAME_INCHES = 0.34, 1.6


@dataclass(frozen=True)
class _Number:
    x: float
    y: float
    said: str


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Draw the JSON of ``bench split``.

    Points and bars share a number a row; a scheme's points share colour and shape. ``central``, which sends nothing,
    is a line in the first panel. Without any accuracy the first panel shows held-out loss.

    Args:
        result: the JSON. ``client_active_s`` may be a number, one a client, or one an emulated link.
        path: .png or .svg; its directory is made.

    Raises:
        BadInput: another suffix, or there is no scheme.
        SaveFailed: the file cannot be written.
    """
    check_suffix(path)
    rows: Sequence[Scheme] = result["schemes"]
    if not rows:
        raise BadInput("There is nothing to draw: the result has no scheme.")
    bars_inches = _FRAME_INCHES + _ROW_INCHES * len(rows)
    quality_inches = 4.2
    figure = Figure(figsize=(11, quality_inches + bars_inches), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    halves = figure.add_gridspec(2, 1, height_ratios=[quality_inches, bars_inches])
    upper, lower = figure.add_subfigure(halves[0]), figure.add_subfigure(halves[1])  # axes of each aligned by itself
    quality = upper.subplots()
    kinds, seconds = lower.subplots(1, 2, sharey=True, width_ratios=[3, 2])
    figure.suptitle(_title(result), fontsize=13, color=INK)
    numbers = _draw_quality(quality, rows)
    _draw_kinds(kinds, rows)
    _draw_seconds(seconds, rows)
    figure.draw_without_rendering()  # only now is it known where anything lies
    figure.set_layout_engine("none")
    _write_numbers(quality, numbers, figure.dpi / 72)
    save(figure, path)


def check_suffix(path: Path) -> None:
    """Refuse a picture that is of no known kind.

    Raises:
        BadInput: so it is.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise BadInput(f"{path} must end in {' or '.join(SUFFIXES)}.")


def save(figure: Figure, path: Path) -> None:
    """Write a picture; its directory is made.

    Raises:
        SaveFailed: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix.lower() == ".svg" else {})
    except OSError as error:
        raise SaveFailed(f"{path} cannot be written: {error.strerror}.") from error


def plain(axes: Axes) -> None:
    """Without the frame's upper and right side, and with its ticks in the colour of text."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)
    axes.set_axisbelow(True)


def _title(result: Mapping[str, Any]) -> str:
    links = result.get("link_mbit")
    speeds = links if isinstance(links, Sequence) else [links] if links else []
    at = f" at {' and '.join(f'{speed:g}' for speed in speeds)} Mbit/s" if speeds else ""
    return f"Split training of task '{result['task']}'{at}"


def _draw_quality(axes: Axes, rows: Sequence[Scheme]) -> list[_Number]:
    """Points and lines; returns what is to be written at each."""
    accuracy = any(row.get("eval_accuracy") is not None for row in rows)
    key = "eval_accuracy" if accuracy else "eval_loss"
    schemes = list(dict.fromkeys(row["scheme"] for row in rows if _total_bytes(row) > 0))
    plain(axes)
    _logarithmic(axes)
    axes.set_xlabel("bytes sent and received, all clients together (MB)", color=INK)
    axes.set_ylabel("held-out accuracy\n(higher is better)" if accuracy else "held-out loss\n(lower is better)")
    axes.grid(color=_FAINT, linewidth=0.8)
    numbers = []
    named = set()
    for number, row in enumerate(rows, 1):
        total, value, scheme = _total_bytes(row) / 1e6, row.get(key), row["scheme"]
        if value is None:
            continue
        if total == 0:
            axes.axhline(value, linestyle="--", linewidth=1.2, color=INK, zorder=2, label=f"{number}  {name_of(row)}")
            continue
        index = schemes.index(scheme)
        axes.plot(
            total, value, _MARKERS[index % len(_MARKERS)], color=_OF_SCHEME[index % len(_OF_SCHEME)],
            markersize=9, markeredgecolor="white", zorder=3, label=None if scheme in named else scheme,
        )  # fmt: skip
        named.add(scheme)
        numbers.append(_Number(total, value, str(number)))
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=6, frameon=False, fontsize=9, borderaxespad=0.2,
        handlelength=1.6, columnspacing=1.6,
    )  # fmt: skip
    axes.margins(x=0.08, y=0.18)
    return numbers


def _joined(by_kind: Mapping[str, float]) -> dict[str, float]:
    """Bytes by kind, with what is too little to be seen in one."""
    joined: dict[str, float] = {}
    for kind, size in by_kind.items():
        name = "other" if kind in _TOO_LITTLE else kind
        joined[name] = joined.get(name, 0.0) + size
    return joined


def _draw_kinds(axes: Axes, rows: Sequence[Scheme]) -> None:
    of_rows = [_joined(row.get("bytes_by_kind") or {}) for row in rows]
    kinds = sorted({kind for of_row in of_rows for kind in of_row})
    plain(axes)
    axes.set_xlabel("bytes by kind of message (MB)")
    axes.set_yticks(range(len(rows)), [f"{number}  {name_of(row)}" for number, row in enumerate(rows, 1)], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    longest = max((_total_bytes(row) for row in rows), default=0) / 1e6
    for place, (row, of_row) in enumerate(zip(rows, of_rows, strict=True)):
        left = 0.0
        for index, kind in enumerate(kinds):
            width = of_row.get(kind, 0) / 1e6
            axes.barh(
                place,
                width,
                left=left,
                height=0.62,
                color=_OF_KIND[index % len(_OF_KIND)],
                edgecolor="white",
                linewidth=0.4,
            )
            left += width
        said = f" {_short(left)}" if left or not _total_bytes(row) else ""
        axes.text(left + 0.005 * longest, place, said, va="center", fontsize=8.5, color=INK)
    axes.set_xlim(0, (longest or 1.0) * 1.14)
    handles = [axes.barh(0, 0, color=_OF_KIND[index % len(_OF_KIND)], label=kind) for index, kind in enumerate(kinds)]
    if handles:
        axes.legend(
            loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, frameon=False, fontsize=8.5, borderaxespad=0.2,
            handlelength=1.2, columnspacing=1.2,
        )  # fmt: skip


def _draw_seconds(axes: Axes, rows: Sequence[Scheme]) -> None:
    """One bar a scheme, or one a link where the result tells them apart."""
    plain(axes)
    axes.set_xlabel("active time of the slowest client (s)")
    axes.tick_params(axis="y", labelleft=False)
    bars: list[tuple[float, float, float, int]] = []
    links: list[str] = []
    for place, row in enumerate(rows):
        values = row.get("client_active_s")
        of_links = list(values.items()) if isinstance(values, Mapping) else [("", values)]
        links = [str(link) for link, _ in of_links if link] or links
        height = 0.62 / len(of_links)
        for index, (_, value) in enumerate(of_links):
            if (active := largest(value)) is not None and active > 0:
                bars.append((place - 0.31 + height * (index + 0.5), active, height, index))
    if not bars:
        return
    low, high = min(bar[1] for bar in bars) / 2, max(bar[1] for bar in bars) * 4
    _logarithmic(axes, (1,) if high / low > _MANY_TICKS else (1, 2, 5))
    axes.set_xlim(low, high)
    for y, active, height, index in bars:
        axes.barh(y, active - low, left=low, height=height, color=_OF_LINK[index % 2], edgecolor="white")
        axes.text(active * 1.08, y, _short(active), va="center", fontsize=8.5 if height > 0.4 else 7, color=INK)
    for index, link in enumerate(links):
        axes.barh(0, 0, color=_OF_LINK[index % 2], label=f"{link} Mbit/s")
    if links:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, frameon=False, fontsize=8.5, borderaxespad=0.2)


def _write_numbers(axes: Axes, numbers: Sequence[_Number], pixels_a_point: float) -> None:
    """Each point's number, at the nearest place that no point, no line and no other number takes."""
    points = [axes.transData.transform((number.x, number.y)) for number in numbers]
    taken = [Bbox.from_extents(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    for line in axes.get_lines():
        if line.get_linestyle() == "--":
            y = line.get_window_extent().y0
            taken.append(Bbox.from_extents(axes.bbox.x0, y - 1, axes.bbox.x1, y + 1))
    for number, (x, y) in zip(numbers, points, strict=True):
        tries = [(dx * far, dy * far) for far in _DISTANCES for dx, dy in _DIRECTIONS]
        offset = next(
            (offset for offset in tries if not _covered(_box(x, y, offset, number.said), taken, axes.bbox)), tries[0]
        )
        taken.append(_box(x, y, offset, number.said))
        far = max(map(abs, offset)) > _DISTANCES[0]
        axes.annotate(
            number.said, (number.x, number.y), xytext=(offset[0] / pixels_a_point, offset[1] / pixels_a_point),
            textcoords="offset points", ha="center", va="center", fontsize=10, color=INK, fontweight="bold", zorder=4,
            arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 0.7, "shrinkB": 5} if far else None,
        )  # fmt: skip


def _box(x: float, y: float, offset: tuple[float, float], said: str) -> Bbox:
    half = 5 + 4 * len(said)
    return Bbox.from_extents(x + offset[0] - half, y + offset[1] - 7, x + offset[0] + half, y + offset[1] + 7)


def _covered(box: Bbox, taken: Sequence[Bbox], inside: Bbox) -> bool:
    within = inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
    return not within or any(box.overlaps(other) for other in taken)


def _logarithmic(axes: Axes, digits: Sequence[int] = (1, 2, 5)) -> None:
    """A logarithmic x axis, in plain numbers that begin with these digits."""
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=digits))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _total_bytes(row: Scheme) -> float:
    return float(row.get("bytes_up") or 0) + float(row.get("bytes_down") or 0)


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3g}"
