"""Files written for a test, and what reading them gives."""

from pathlib import Path

import pytest

from potluck.errors import BadInput
from potluck.job_sections import Format
from potluck.texts.rows import Chat, Completion, Document, Instruction, Message, Row, read_rows

TURNS = (Message("user", "hi"), Message("assistant", "yes"))


def rows_of(path: Path, content: str | bytes, format: Format = "auto") -> list[Row]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_rows([str(path)], format)


def refused(path: Path, content: str | bytes, format: Format = "auto") -> str:
    with pytest.raises(BadInput) as caught:
        rows_of(path, content, format)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert str(path) in sentence
    return sentence.replace(str(path), path.name)


def content_of(row: Row) -> object:
    match row:
        case Chat():
            return row.messages
        case Instruction():
            return (row.instruction, row.material, row.output)
        case Completion():
            return (row.prompt, row.completion)
        case Document():
            return (row.text,)
