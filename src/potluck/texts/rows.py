"""Sources to rows: files, ``datasets`` directories and hub ids, each held to one format."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from potluck.errors import BadInput
from potluck.job_sections import Format
from potluck.texts.formats import Chat, Completion, Document, Instruction, Message, Row, parse_record
from potluck.texts.hub import is_saved_dataset, read_hub_dataset, read_saved_dataset
from potluck.texts.readers import READERS, Record, read_file

__all__ = ["Chat", "Completion", "Document", "Instruction", "Message", "Row", "read_rows", "records_of"]

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
_SPLIT = re.compile(r"(?P<source>.+):(?P<split>\w+)")


def read_rows(sources: Sequence[str], format: Format) -> list[Row]:
    """Read all rows of all sources, in order.

    Args:
        sources: files (.jsonl .json .csv .parquet .txt .md), directories written by ``datasets``' ``save_to_disk``,
            or hub data set ids; the last two may end in ``:split`` (default ``train``). A .txt or .md file is one
            document.
        format: how a row is read; ``auto`` decides by the keys of a source's first row. All rows of one source have
            the same format; sources may differ.

    Raises:
        BadInput: a source is missing, empty, or not UTF-8, or a line is not valid, or not of the source's format.
    """
    return [row for source in sources for row in _rows_of(source, format)]


def _rows_of(source: str, format: Format) -> list[Row]:
    rows: list[Row] = []
    for where, record in records_of(source):
        row = parse_record(record, format, where)
        if rows and row.format != rows[0].format:
            raise BadInput(
                f"{where}: this row has the format '{row.format}', but those before it have '{rows[0].format}'"
                f" (since {rows[0].where}); one source must have one format."
            )
        rows.append(row)
    if not rows:
        raise BadInput(f"{source} is empty: it holds no row.")
    return rows


def records_of(source: str) -> Iterator[Record]:
    """The records of one source, each with its place.

    Raises:
        BadInput: there is no such source, or it cannot be read.
    """
    path = Path(source)
    if path.is_file():
        return read_file(path)
    if path.is_dir():
        return _directory(path, None)
    with_split = _SPLIT.fullmatch(source)
    name, split = (with_split["source"], with_split["split"]) if with_split else (source, None)
    if with_split and Path(name).is_dir():
        return _directory(Path(name), split)
    if _HUB_ID.fullmatch(name) and Path(name).suffix.lower() not in READERS:
        return read_hub_dataset(name, split)
    raise BadInput(f"There is no data file or directory at {source}.")


def _directory(path: Path, split: str | None) -> Iterator[Record]:
    if not is_saved_dataset(path):
        raise BadInput(
            f"{path} is a directory, but not one that 'save_to_disk' of the datasets library wrote;"
            " name the files in it instead."
        )
    return read_saved_dataset(path, split)
