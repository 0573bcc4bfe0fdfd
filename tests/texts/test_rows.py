"""Sources in order, each of one format."""

from pathlib import Path

import pytest
from sources import refused

from potluck.errors import BadInput
from potluck.texts.rows import read_rows


def test_a_line_of_another_format_or_type(tmp_path: Path) -> None:
    mixed = '{"text": "a", "label": "x"}\n{"text": "b", "label": null}\n'
    sentence = refused(tmp_path / "a.jsonl", mixed)
    assert sentence.startswith("a.jsonl:2: this row has the format 'text', but those before it have 'label'")
    assert "a.jsonl:2: expected an object" in refused(tmp_path / "a.jsonl", '{"text": "a"}\n["b"]\n')


def test_several_sources_come_in_order_and_may_differ(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("b")
    (tmp_path / "a.jsonl").write_text('{"prompt": "p", "completion": "c"}\n')
    rows = read_rows([str(tmp_path / "b.txt"), str(tmp_path / "a.jsonl")], "auto")
    assert [row.format for row in rows] == ["text", "prompt"]


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    for name in ("none.jsonl", "none.JSONL", "some where/none"):
        with pytest.raises(BadInput, match=rf"no data file or directory at .*{name}"):
            read_rows([str(tmp_path / name)], "auto")
    with pytest.raises(BadInput, match=r"no data file or directory at data/train\.jsonl"):
        read_rows(["data/train.jsonl"], "auto")
    with pytest.raises(BadInput, match="is a directory, but not one"):
        read_rows([str(tmp_path)], "auto")
    assert "accepted are .jsonl, .json, .csv" in refused(tmp_path / "a.xlsx", "x")
