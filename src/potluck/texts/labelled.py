"""Sources to rows with a label: one text or a pair, and a class or a value."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from potluck.errors import BadInput
from potluck.job_sections import Data, Task
from potluck.texts.columns import Columns, find_columns
from potluck.texts.rows import records_of
from potluck.texts.values import checked_text, keys_of, kind_of

_LARGEST = 1e19  # errors are squared, in float32
_WHOLE = re.compile(r"[+-]?[0-9]+")
_FRACTION = re.compile(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=e))(e[+-]?[0-9]+)?|nan", re.IGNORECASE)


@dataclass(frozen=True)
class Labelled:
    """A text, or a pair of texts, with what a classifier is to say of it."""

    text: str
    text_pair: str | None
    label: str | float
    """The name of a class, or a value."""
    where: str
    columns: Columns


def read_labelled(sources: Sequence[str], data: Data, task: Task, *, others: bool = False) -> list[Labelled]:
    """Read all rows of all sources, in order.

    Args:
        sources: as for :func:`potluck.texts.rows.read_rows`.
        data: names columns, and perhaps classes.
        task: ``sequence-classification`` (labels are names, or whole numbers, which become names) or
            ``sequence-regression`` (labels are finite numbers).
        others: see :func:`potluck.texts.columns.find_columns`.

    Raises:
        BadInput: a source cannot be read, a column is missing, a text is empty, a label is none of the task's, or some
            rows have one text and others two. A message holds no label: it may travel where labels may not.
    """
    rows = [row for source in sources for row in _rows_of(source, data, task, others)]
    check_alike(rows)
    return rows


def check_alike(rows: Sequence[Labelled]) -> None:
    """See that all rows have a second text, or none has.

    Raises:
        BadInput: some have one.
    """
    pairs = [row for row in rows if row.text_pair is not None]
    if pairs and len(pairs) < len(rows):
        single = next(row for row in rows if row.text_pair is None)
        raise BadInput(
            f"{single.where}: one text ('{single.columns.text}'), but {pairs[0].where} has two "
            f"('{pairs[0].columns.text}', '{pairs[0].columns.text_pair}'); name data.text and data.text_pair."
        )


def classes_of(rows: Sequence[Labelled], named: Sequence[str]) -> list[str]:
    """The names of the classes in the order of their indices.

    These are the ``named``, or else those found in the rows, sorted; whole numbers are sorted as numbers.

    Raises:
        BadInput: there are fewer than two.
    """
    if named:
        return list(named)
    names = {row.label for row in rows if isinstance(row.label, str)}
    if len(names) < 2:
        raise BadInput(
            f"All {len(rows)} training rows have the same label ('{next(iter(names), '')}'): to tell classes apart, "
            "there must be at least two."
        )
    if all(_WHOLE.fullmatch(name) for name in names):
        return sorted(names, key=lambda name: (int(name), name))
    return sorted(names)


def _rows_of(source: str, data: Data, task: Task, others: bool) -> list[Labelled]:
    rows: list[Labelled] = []
    columns: Columns | None = None
    for where, record in records_of(source):
        if not isinstance(record, dict):
            found = "a text without a label" if isinstance(record, str) else kind_of(record)
            raise BadInput(f"{where}: {task} needs an object with a text and a label, found {found}.")
        if columns is None:
            columns = find_columns(record, data, task, where, others=others)
        rows.append(_row(record, columns, task, data.labels, where))
    if not rows:
        raise BadInput(f"{source} is empty: it holds no row.")
    return rows


def _row(record: Mapping[object, object], columns: Columns, task: Task, named: Collection[str], where: str) -> Labelled:
    text = _text(record, columns.text, where)
    pair = None if columns.text_pair is None else _text(record, columns.text_pair, where, beside=columns.text)
    if columns.label not in record:
        raise BadInput(f"{where}: this row has no '{columns.label}', its label; keys found: {keys_of(record)}.")
    label = record[columns.label]
    if task == "sequence-regression":
        return Labelled(text, pair, _value(label, columns.label, where), where, columns)
    return Labelled(text, pair, _class(label, columns.label, named, where), where, columns)


def _text(record: Mapping[object, object], column: str, where: str, beside: str | None = None) -> str:
    of_pair = "" if beside is None else f" beside '{beside}': a pair needs both"
    if column not in record:
        raise BadInput(f"{where}: this row has no '{column}'{of_pair}; keys found: {keys_of(record)}.")
    if beside is not None and record[column] is None:
        raise BadInput(f"{where}: '{column}' is null{of_pair}.")
    text = checked_text(record[column], f"'{column}'", where)
    if not text.strip():
        raise BadInput(f"{where}: '{column}' is empty{of_pair or ': there is nothing to learn from'}.")
    return text


def _class(label: object, column: str, named: Collection[str], where: str) -> str:
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, int):
        return str(label)
    if isinstance(label, str) and label.strip():
        name = checked_text(label, f"'{column}'", where).strip()
        if name in named or not _FRACTION.fullmatch(name):
            return name
    if isinstance(label, str | float) and str(label).strip():
        raise BadInput(
            f"{where}: '{column}' is not a whole number or a name, but a number written with a fraction (or NaN). For "
            "values take task: sequence-regression; if these are names of classes, list all of them in data.labels."
        )
    found = "an empty string" if isinstance(label, str) else kind_of(label)
    raise BadInput(f"{where}: '{column}' must be the name of a class or a whole number, found {found}.")


def _value(label: object, column: str, where: str) -> float:
    value = math.nan
    if isinstance(label, int | float | str) and not isinstance(label, bool):
        try:
            value = float(label)
        except (ValueError, OverflowError):
            value = math.nan
    if not math.isfinite(value):
        raise BadInput(f"{where}: '{column}' is no finite number, which is what sequence-regression learns.")
    if abs(value) > _LARGEST:
        raise BadInput(
            f"{where}: '{column}' is beyond {_LARGEST:g}, and its square would be none in float32: scale the values."
        )
    return value
