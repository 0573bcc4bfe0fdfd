"""Labelled rows of files: classes and values, singles and pairs, and what is refused."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_example import data

from potluck.errors import BadInput
from potluck.job_sections import Task
from potluck.texts.columns import Columns
from potluck.texts.labelled import Labelled, classes_of, read_labelled

CLASSES: Task = "sequence-classification"
VALUES: Task = "sequence-regression"


def read(path: Path, content: str | list[object], task: Task = CLASSES, **named: object) -> list[Labelled]:
    text = content if isinstance(content, str) else "".join(json.dumps(record) + "\n" for record in content)
    path.write_text(text, encoding="utf-8")
    return read_labelled([str(path)], data(**named), task)


def refused(path: Path, content: str | list[object], task: Task = CLASSES, **named: object) -> str:
    with pytest.raises(BadInput) as caught:
        read(path, content, task, **named)
    return str(caught.value).replace(str(path), path.name)


def test_a_table_of_classes(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.csv", 'body,spam\n"buy, now",yes\nhello, no\n', text="body", label="spam")
    columns = Columns("body", None, "spam")
    assert rows == [
        Labelled("buy, now", None, "yes", f"{tmp_path / 'a.csv'}:2", columns),
        Labelled("hello", None, "no", f"{tmp_path / 'a.csv'}:3", columns),
    ]


def test_a_table_of_pairs_with_values(tmp_path: Path) -> None:
    records: list[object] = [
        {"sentence1": "a", "sentence2": "b", "label": 4.5},
        {"sentence1": "c", "sentence2": "d", "label": 2},
    ]
    rows = read(tmp_path / "a.jsonl", records, VALUES)
    assert [(row.text, row.text_pair, row.label) for row in rows] == [("a", "b", 4.5), ("c", "d", 2.0)]
    assert all(isinstance(row.label, float) for row in rows)
    rows = read(tmp_path / "a.csv", "sentence,score\na, 4.5\nb,-1e-3\nc,3\n", VALUES)
    assert [row.label for row in rows] == [4.5, -0.001, 3.0]


@pytest.mark.parametrize(
    ("label", "name"),
    [("spam", "spam"), (" spam ", "spam"), (3, "3"), (-1, "-1"), ("3", "3"), (True, "true"), ("v1.2", "v1.2")],
)
def test_classes_by_name(label: object, name: str, tmp_path: Path) -> None:
    assert [row.label for row in read(tmp_path / "a.jsonl", [{"text": "a", "label": label}])] == [name]


FRACTION = (
    "'label' is not a whole number or a name, but a number written with a fraction (or NaN). For values take task"
)


@pytest.mark.parametrize(
    ("label", "sentence"),
    [
        (0.5, FRACTION),
        (1.0, FRACTION),
        (float("nan"), FRACTION),
        ("0.5", FRACTION),
        ("1e3", FRACTION),
        ("NaN", FRACTION),
        (None, "'label' must be the name of a class or a whole number, found null."),
        ("  ", "'label' must be the name of a class or a whole number, found an empty string."),
        (["a"], "'label' must be the name of a class or a whole number, found a list."),
    ],
)
def test_labels_that_are_no_classes(label: object, sentence: str, tmp_path: Path) -> None:
    records: list[object] = [{"text": "a", "label": "x"}, {"text": "b", "label": label}]
    said = refused(tmp_path / "a.jsonl", records)
    assert said.startswith(f"a.jsonl:2: {sentence}")
    assert repr(label) not in said  # it may be told to a coordinator, and labels stay


def test_names_of_classes_may_look_like_fractions(tmp_path: Path) -> None:
    records: list[object] = [{"text": "a", "label": "1.2"}, {"text": "b", "label": "1.3"}]
    rows = read(tmp_path / "a.jsonl", records, labels=["1.2", "1.3"])
    assert [row.label for row in rows] == ["1.2", "1.3"]


@pytest.mark.parametrize("label", ["high", "", None, True, float("nan"), "inf", [1], 10**400])
def test_labels_that_are_no_values(label: object, tmp_path: Path) -> None:
    said = refused(tmp_path / "a.jsonl", [{"text": "a", "label": label}], VALUES)
    assert said == "a.jsonl:1: 'label' is no finite number, which is what sequence-regression learns."


@pytest.mark.parametrize(
    ("record", "sentence"),
    [
        ({"sentence1": "a", "label": 1}, "this row has no 'sentence2' beside 'sentence1': a pair needs both; keys"),
        ({"sentence1": "a", "sentence2": None, "label": 1}, "'sentence2' is null beside 'sentence1': a pair needs b"),
        ({"sentence1": "a", "sentence2": " ", "label": 1}, "'sentence2' is empty beside 'sentence1': a pair needs"),
        ({"sentence1": " ", "sentence2": "b", "label": 1}, "'sentence1' is empty: there is nothing to learn from."),
        ({"sentence1": 5, "sentence2": "b", "label": 1}, "'sentence1' must be a string"),
        ({"sentence1": "a", "sentence2": "b"}, "this row has no 'label', its label; keys found: sentence1, sent"),
        ([1], "sequence-classification needs an object with a text and a label, found a list."),
    ],
)
def test_rows_that_lack_something(record: object, sentence: str, tmp_path: Path) -> None:
    whole = {"sentence1": "a", "sentence2": "b", "label": 1}
    assert refused(tmp_path / "a.jsonl", [whole, record]).startswith(f"a.jsonl:2: {sentence}")


def test_a_text_file_has_no_labels(tmp_path: Path) -> None:
    assert "needs an object with a text and a label, found a text without a label" in refused(tmp_path / "a.md", "hi")
    assert "is empty" in refused(tmp_path / "a.csv", "text,label\n")


def test_singles_and_pairs_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("text,label\na,1\n")
    (tmp_path / "two.csv").write_text("premise,hypothesis,label\na,b,1\n")
    with pytest.raises(BadInput, match=r"one\.csv:2: one text \('text'\), but .*two\.csv:2 has two \('premise', 'hypo"):
        read_labelled([str(tmp_path / "two.csv"), str(tmp_path / "one.csv")], data(), CLASSES)


def labelled(label: str | float, where: str = "x:1") -> Labelled:
    return Labelled("a", None, label, where, Columns("text", None, "label"))


@given(st.lists(st.integers(-200, 200), min_size=2, unique=True))
def test_whole_numbers_are_sorted_as_numbers(numbers: list[int]) -> None:
    rows = [labelled(str(number)) for number in [*numbers, *numbers]]
    assert classes_of(rows, []) == [str(number) for number in sorted(numbers)]


def test_classes_are_sorted_unless_named() -> None:
    rows = [labelled(name) for name in ("spam", "ham", "10", "9", "spam")]
    assert classes_of(rows, []) == ["10", "9", "ham", "spam"]
    assert classes_of(rows, ["spam", "ham"]) == ["spam", "ham"]
    with pytest.raises(BadInput, match=r"All 2 training rows have the same label \('spam'\)"):
        classes_of([labelled("spam"), labelled("spam")], [])


def test_class_names_of_any_column_of_a_parquet_file(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")
    features = datasets.Features(
        {"sentence": datasets.Value("string"), "topic": datasets.ClassLabel(names=["sports", "world"])}
    )
    table = datasets.Dataset.from_dict({"sentence": ["a", "b"], "topic": [1, 0]}, features=features)
    table.to_parquet(str(tmp_path / "a.parquet"))
    table.save_to_disk(str(tmp_path / "saved"))
    for source in ("a.parquet", "saved"):
        rows = read_labelled([str(tmp_path / source)], data(), CLASSES)
        assert [(row.text, row.label) for row in rows] == [("a", "world"), ("b", "sports")]


def test_values_whose_squares_are_beyond_float32(tmp_path: Path) -> None:
    said = refused(tmp_path / "a.jsonl", [{"text": "a", "label": 1e300}], task=VALUES)
    assert "'label' is beyond 1e+19" in said
