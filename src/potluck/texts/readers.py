"""Files to records: one reader a file type; each record comes with its line."""

import csv
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from potluck.errors import BadInput

Record = tuple[str, object]
"""``where`` ("data.jsonl:17") and what stands there."""

_BOM = b"\xef\xbb\xbf"
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


def read_file(path: Path) -> Iterator[Record]:
    """The records of one file, by its suffix; see :data:`READERS`.

    A byte-order mark and blank lines are accepted. Lines are counted from 1; a row of a .parquet file counts as one.

    Raises:
        BadInput: the suffix is unknown, or the file cannot be read, is not UTF-8, or is not what its suffix says.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise BadInput(f"{path}: files of this type cannot be read; accepted are {', '.join(READERS)}.")
    try:
        yield from reader(path)
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}.") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    # Only "\n" ends a line: str.splitlines would also cut at U+2028 and others, which JSON allows inside strings.
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            try:
                yield number, (raw.removeprefix(_BOM) if number == 1 else raw).decode("utf-8")
            except UnicodeDecodeError as error:
                guess = " (it looks like UTF-16)" if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
                raise BadInput(
                    f"{path}:{number}: not UTF-8{guess}: byte 0x{error.object[error.start]:02x} at column"
                    f" {error.start + 1}. Save the file as UTF-8."
                ) from None


def _whole(path: Path) -> str:
    return "".join(line for _, line in _lines(path))


def _jsonl(path: Path) -> Iterator[Record]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield where, json.loads(line)
        except json.JSONDecodeError as error:
            raise BadInput(
                f"{where}, column {error.colno}: not valid JSON ({error.msg}); a .jsonl file has one object a line."
            ) from None
        except (RecursionError, ValueError) as error:
            raise BadInput(f"{where}: this JSON cannot be read: {error}.") from None


def _json(path: Path) -> Iterator[Record]:
    """A list of records, or records one after another."""
    text = _whole(path)
    line, counted = 1, 0
    try:
        for start, value in _json_values(text):
            line, counted = line + text.count("\n", counted, start), start
            yield f"{path}:{line}", value
    except json.JSONDecodeError as error:
        raise BadInput(f"{path}:{error.lineno}, column {error.colno}: not valid JSON ({error.msg}).") from None
    except (RecursionError, ValueError) as error:
        raise BadInput(f"{path}: this JSON cannot be read: {error}.") from None


def _json_values(text: str) -> Iterator[tuple[int, object]]:
    decoder = json.JSONDecoder()

    def after_space(position: int) -> int:
        space = _JSON_SPACE.match(text, position)
        return space.end() if space else position

    position = after_space(0)
    in_list = text.startswith("[", position)
    if in_list:
        position = after_space(position + 1)
        if text.startswith("]", position):
            in_list, position = False, after_space(position + 1)
    while in_list or position < len(text):
        value, end = decoder.raw_decode(text, position)
        yield position, value
        position = after_space(end)
        if not in_list:
            continue
        if text.startswith(",", position):
            position = after_space(position + 1)
        elif text.startswith("]", position):
            position = after_space(position + 1)
            if position < len(text):
                raise json.JSONDecodeError("Extra data after the list", text, position)
            return
        else:
            raise json.JSONDecodeError("Expecting ',' or ']'", text, position)


def _csv(path: Path) -> Iterator[Record]:
    """Comma-separated, the first row naming the columns; quoted fields may span lines."""
    csv.field_size_limit(2**31 - 1)
    table = csv.reader((line for _, line in _lines(path)), strict=True)
    header: list[str] | None = None
    first_line = 1
    try:
        for fields in table:
            where, first_line = f"{path}:{first_line}", table.line_num + 1
            if not any(field.strip() for field in fields):
                continue
            if header is None:
                header = [name.strip() for name in fields]
                repeated = {name for name in header if header.count(name) > 1}
                if repeated:
                    raise BadInput(f"{where}: the column '{min(repeated)}' appears twice.")
            elif len(fields) != len(header):
                raise BadInput(f"{where}: {len(fields)} fields, but the first row names {len(header)} columns.")
            else:
                yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise BadInput(f"{path}:{first_line}: not valid CSV ({error}).") from None


def _parquet(path: Path) -> Iterator[Record]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise BadInput(f"{path}: reading .parquet needs pyarrow: pip install 'potluck[parquet]'.") from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = _class_names((file.schema_arrow.metadata or {}).get(b"huggingface"))
            for table in file.iter_batches(batch_size=1024):
                for record in table.to_pylist():
                    number += 1
                    yield f"{path}:{number}", with_class_names(record, names)
    except (ArrowException, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not a .parquet file that can be read: {first_line_of(error)}") from None


def _class_names(metadata: bytes | None) -> dict[str, list[str]]:
    """The class names that the ``datasets`` library writes into a .parquet file's schema, by column."""
    try:
        features = json.loads(metadata or b"null")["info"]["features"]
        named = {column: feature.get("names") for column, feature in features.items() if isinstance(feature, dict)}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {column: [str(name) for name in names] for column, names in named.items() if isinstance(names, list)}


def with_class_names(record: dict[str, object], names: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """The record with the names of classes in place of their indices, in the columns that ``names`` knows."""
    named = {}
    for column, of_column in names.items():
        index = record.get(column)
        if isinstance(index, int) and 0 <= index < len(of_column):
            named[column] = of_column[index]
    return {**record, **named}


def first_line_of(error: BaseException) -> str:
    """What another library's error says, short enough for a sentence of ours."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _document(path: Path) -> Iterator[Record]:
    text = _whole(path)
    if text.strip():
        yield f"{path}:1", text


READERS: dict[str, Callable[[Path], Iterator[Record]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".parquet": _parquet,
    ".txt": _document,
    ".md": _document,
}
"""What reads each file type."""
