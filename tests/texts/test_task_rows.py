"""What a job's rows say of themselves, whatever its task."""

from pathlib import Path

import pytest
from one_example import data

from bert_tokenizer import bert_tokenizer
from potluck.errors import BadInput
from potluck.texts.labelled import Labelled
from potluck.texts.readable import check_readable
from potluck.texts.task_rows import encode_for_task, read_for, with_classes, with_columns


def test_the_same_file_for_two_tasks(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\nw0 w1,2\nw2,10\n")
    sources = [str(tmp_path / "a.csv")]
    tokenizer = bert_tokenizer(["w0", "w1", "w2", "2", "10"])
    rows = read_for("sequence-classification", sources, data())
    named = with_classes(with_columns(data(), rows), rows)
    assert (named.text, named.text_pair, named.label, named.labels) == ("text", None, "label", ["2", "10"])
    examples = encode_for_task(rows, tokenizer, named, reads="first", types=True).examples
    assert [example.label for example in examples] == [0, 1]

    tokenizer.eos_token = "[SEP]"
    said = read_for("causal-lm", sources, data())
    assert with_classes(with_columns(data(), said), said) == data()
    assert [e.answer for e in encode_for_task(said, tokenizer, data(), reads="first", types=True).examples] == [
        "2",
        "10",
    ]


def test_columns_stay_open_where_sources_differ(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,label\na,1\n")
    (tmp_path / "b.csv").write_text("sentence,label\na,2\n")
    rows = read_for("sequence-classification", [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")], data())
    assert with_columns(data(), rows) == data()
    assert with_classes(data(labels=["2", "1"]), rows).labels == ["2", "1"]
    values = read_for("sequence-regression", [str(tmp_path / "a.csv")], data())
    assert with_classes(data(), values).labels == []


def test_training_on_pairs_is_not_judged_by_singles(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("sentence1,sentence2,label\na,b,1\n")
    (tmp_path / "b.csv").write_text("text,label\na,2\n")
    rows = [
        row for name in "ab" for row in read_for("sequence-classification", [str(tmp_path / f"{name}.csv")], data())
    ]
    assert all(isinstance(row, Labelled) for row in rows)
    with pytest.raises(BadInput, match=r"b\.csv:2: one text"):
        with_columns(data(), rows)


def test_what_no_task_could_use_is_not_readable(tmp_path: Path) -> None:
    good = {"a.csv": "body,spam\na,1\n", "b.jsonl": '{"prompt": "a", "completion": "b"}\n', "c.txt": "text"}
    for name, content in good.items():
        (tmp_path / name).write_text(content)
    check_readable([str(tmp_path / name) for name in good])
    bad = {"a.csv": "body\na\n", "b.jsonl": "[1]\n", "c.csv": "a,b\n1\n", "d.csv": "", "e.jsonl": "{"}
    for name, content in bad.items():
        (tmp_path / name).write_text(content)
        with pytest.raises(BadInput, match=name):
            check_readable([str(tmp_path / name)])
