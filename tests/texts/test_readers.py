"""Each file type, whole and damaged; errors name the line."""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources import TURNS, content_of, refused, rows_of

from potluck.errors import BadInput
from potluck.texts.formats import Document
from potluck.texts.readers import read_file
from potluck.texts.rows import read_rows


def test_jsonl_with_byte_order_mark_blank_lines_and_line_separators(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "b\xe2\x80\xa8c"}')
    assert [(row.where.rpartition(":")[2], content_of(row)) for row in rows] == [("1", ("a",)), ("4", ("b\u2028c",))]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.md"])
def test_empty_files(tmp_path: Path, name: str) -> None:
    for content in (b"", b"\n\n", b"\xef\xbb\xbf"):
        assert "is empty" in refused(tmp_path / name, content)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_line_that_is_not_utf8(tmp_path: Path, name: str) -> None:
    sentence = refused(tmp_path / name, b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    assert sentence.startswith(f"{name}:2: not UTF-8: byte 0xe9 at column 14.")
    assert "looks like UTF-16" in refused(tmp_path / name, '{"text": "a"}'.encode("utf-16"))


def test_invalid_json_lines(tmp_path: Path) -> None:
    assert refused(tmp_path / "a.jsonl", '{"text": "a"}\n{"text": }\n').startswith("a.jsonl:2, column 10: not valid")
    assert "a.jsonl:1: this JSON cannot be read" in refused(tmp_path / "a.jsonl", "[" * 100_000)
    assert "a.jsonl:1: this JSON cannot be read" in refused(tmp_path / "a.jsonl", '{"text": ' + "1" * 5000 + "}")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    records=st.lists(json_values, max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    ascii=st.booleans(),
    many=st.booleans(),
)
def test_json_files_hold_a_list_or_records_in_a_row(
    tmp_path_factory: pytest.TempPathFactory, records: list[object], indent: int | None, ascii: bool, many: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    if many:
        records = [{"record": record} for record in records]
        parts = [json.dumps(record, indent=indent, ensure_ascii=ascii) for record in records]
        text = "\n".join(parts)
        lines = [1 + sum(part.count("\n") + 1 for part in parts[:number]) for number in range(len(parts))]
    else:
        text = json.dumps(records, indent=indent, ensure_ascii=ascii)
        lines = []
    path.write_text(text, encoding="utf-8", newline="")
    found = list(read_file(path))
    assert [value for _, value in found] == records
    if many:
        assert [where for where, _ in found] == [f"{path}:{line}" for line in lines]


def test_json_lists_count_lines(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "a.json", '[\n {"text": "a"},\n\n {"text":\n "b"}, {"text": "c"}\n]\n')
    assert [row.where.rpartition(":")[2] for row in rows] == ["2", "4", "5"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ('[{"text": "a"}\n {"text": "b"}]', "a.json:2, column 2: not valid JSON (Expecting ',' or ']')."),
        ('[{"text": "a"}', "a.json:1, column 15: not valid JSON (Expecting ',' or ']')."),
        ('[{"text": "a"},]', "a.json:1, column 16: not valid JSON"),
        ('[{"text": "a"}]\nx', "a.json:2, column 1: not valid JSON (Extra data after the list)."),
        ('{"data": [{"text": "a"}]}', "a.json:1: no known format has the keys found: data."),
        ("[]", "a.json is empty"),
    ],
)
def test_wrong_json_files(tmp_path: Path, content: str, sentence: str) -> None:
    assert refused(tmp_path / "a.json", content).startswith(sentence)


def test_csv_with_quotes_over_lines(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path / "a.csv", b'\xef\xbb\xbftext, label\r\n"a, ""b""\nc",x\r\n\r\n,y\n' + b"z" * 200_000 + b",1\n"
    )
    assert [content_of(row) for row in rows] == [('a, "b"\nc', "x"), ("", "y"), ("z" * 200_000, "1")]
    assert [row.where.rpartition(":")[2] for row in rows] == ["2", "5", "6"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("text,label\na,b\na\n", "a.csv:3: 1 fields, but the first row names 2 columns."),
        ("text,label\na,b,c\n", "a.csv:2: 3 fields, but the first row names 2 columns."),
        ("text,text\na,b\n", "a.csv:1: the column 'text' appears twice."),
        ('text,label\na,b\n"a,b\n', "a.csv:3: not valid CSV (unexpected end of data)."),
        ("text;label\na;b\n", "a.csv:2: no known format has the keys found: text;label."),
        ("text,label\n", "a.csv is empty"),
    ],
)
def test_wrong_csv_files(tmp_path: Path, content: str, sentence: str) -> None:
    assert refused(tmp_path / "a.csv", content).startswith(sentence)


@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    text = "# A\r\n\n  two\u2028paragraphs\n\n"
    assert rows_of(tmp_path / name, text) == [Document(text, f"{tmp_path / name}:1", "text")]
    assert "expected an object" in refused(tmp_path / name, text, "messages")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}")

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(BadInput, match=r"a\.jsonl cannot be read: Permission denied"):
        read_rows([str(path)], "auto")


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="the extra 'parquet' is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra 'parquet' is not installed")
    path = tmp_path / "a.parquet"
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    parquet.write_table(pa.table({"conversations": [turns] * 3, "id": [1, 2, 3]}), path)
    rows = read_rows([str(path)], "auto")
    assert [content_of(row) for row in rows] == [TURNS] * 3
    assert rows[2].where == f"{path}:3"
    assert refused(path, b"PAR1 but no more").startswith("a.parquet is not a .parquet file")
    parquet.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(BadInput, match="is empty"):
        read_rows([str(path)], "auto")


def test_parquet_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert "pip install 'potluck[parquet]'" in refused(tmp_path / "a.parquet", b"PAR1")
