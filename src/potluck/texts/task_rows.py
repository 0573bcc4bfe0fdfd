"""Rows and examples of whatever task a job has."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from potluck.job_sections import Data, Task
from potluck.texts.encode import Encoded, encode
from potluck.texts.encode_labelled import Reads, encode_labelled
from potluck.texts.labelled import Labelled, check_alike, classes_of, read_labelled
from potluck.texts.rows import Row, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TaskRow = Row | Labelled


def read_for(task: Task, sources: Sequence[str], data: Data, *, others: bool = False) -> Sequence[TaskRow]:
    """All rows of all sources, in order, as the task reads them.

    Args:
        task: of the job.
        sources: as for :func:`potluck.texts.rows.read_rows`.
        data: the job's data section, as far as it says how rows are read.
        others: see :func:`potluck.texts.columns.find_columns`.

    Raises:
        BadInput: a source cannot be read, or holds what the task cannot use.
    """
    if task == "causal-lm":
        return read_rows(sources, data.format)
    return read_labelled(sources, data, task, others=others)


def with_classes(data: Data, rows: Sequence[TaskRow]) -> Data:
    """The data section with the names of the classes of these rows, of training, where it does not name them.

    Raises:
        BadInput: the rows have classes, but fewer than two.
    """
    classified = [row for row in rows if isinstance(row, Labelled) and isinstance(row.label, str)]
    return data.model_copy(update={"labels": classes_of(classified, data.labels)}) if classified else data


def with_columns(data: Data, rows: Sequence[TaskRow]) -> Data:
    """The data section with the names of the columns of these rows, where all have the same.

    Raises:
        BadInput: some have a second text, and some have none.
    """
    labelled = [row for row in rows if isinstance(row, Labelled)]
    check_alike(labelled)
    found = {row.columns for row in labelled}
    return data.model_copy(update=asdict(found.pop())) if len(found) == 1 else data


def encode_for_task(
    rows: Sequence[TaskRow], tokenizer: "PreTrainedTokenizerBase", data: Data, *, reads: Reads, types: bool
) -> Encoded:
    """Turn rows that :func:`read_for` gave into examples; ``reads`` and ``types`` matter to labelled ones.

    Raises:
        BadInput: no example is left, a label is none of ``data.labels``, or a row cannot be encoded.
    """
    if labelled := [row for row in rows if isinstance(row, Labelled)]:
        return encode_labelled(labelled, tokenizer, data, reads=reads, types=types)
    return encode([row for row in rows if not isinstance(row, Labelled)], tokenizer, data)
