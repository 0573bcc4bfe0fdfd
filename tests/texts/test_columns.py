"""Columns named and found, and the sentence for each way in which that fails."""

import re

import pytest
from one_example import data

from potluck.errors import BadInput
from potluck.job_sections import Task
from potluck.texts.columns import Columns, find_columns

CLASSES: Task = "sequence-classification"
VALUES: Task = "sequence-regression"


def found(keys: str, task: Task = CLASSES, *, others: bool = False, **named: str) -> Columns:
    return find_columns(dict.fromkeys(keys.split(), "x"), data(**named), task, "x.csv:2", others=others)


@pytest.mark.parametrize(
    ("keys", "columns"),
    [
        ("text label", Columns("text", None, "label")),
        ("idx sentence label", Columns("sentence", None, "label")),
        ("label sentence2 sentence1", Columns("sentence1", "sentence2", "label")),
        ("premise hypothesis label", Columns("premise", "hypothesis", "label")),
        ("question1 question2 label", Columns("question1", "question2", "label")),
        ("question sentence label", Columns("question", "sentence", "label")),
        ("text text_pair labels", Columns("text", "text_pair", "labels")),
        ("review class", Columns("review", None, "class")),
        ("question category", Columns("question", None, "category")),
        ("text sentence1 sentence2 label", Columns("sentence1", "sentence2", "label")),
    ],
)
def test_columns_are_found_by_their_names(keys: str, columns: Columns) -> None:
    assert found(keys) == columns


def test_what_is_named_is_taken() -> None:
    assert found("body spam", text="body", label="spam") == Columns("body", None, "spam")
    assert found("sentence1 sentence2 label", text="sentence1") == Columns("sentence1", None, "label")
    assert found("a text label", text_pair="a") == Columns("text", "a", "label")
    assert found("text label target", label="target") == Columns("text", None, "target")
    assert found("text label", label="text", text="label") == Columns("label", None, "text")


def test_values_have_names_of_their_own() -> None:
    assert found("sentence1 sentence2 score", VALUES) == Columns("sentence1", "sentence2", "score")
    assert found("review rating", VALUES) == Columns("review", None, "rating")
    with pytest.raises(BadInput, match=r"no column of labels is found; keys found: review, rating\."):
        found("review rating")


def test_named_columns_that_another_file_calls_otherwise() -> None:
    named = {"text": "body", "label": "spam"}
    assert found("sentence label", others=True, **named) == Columns("sentence", None, "label")
    assert found("body spam text label", others=True, **named) == Columns("body", None, "spam")


@pytest.mark.parametrize(
    ("keys", "named", "sentence"),
    [
        ("text spam", {}, "no column of labels is found; keys found: text, spam. Name it in data.label, or call it l"),
        ("text label", {"label": "spam"}, "data.label names the column 'spam'; keys found: text, label."),
        ("text label", {"text": "body"}, "data.text names the column 'body'; keys found: text, label."),
        ("text label", {"text_pair": "b"}, "data.text_pair names the column 'b'; keys found: text, label."),
        ("a label", {}, "no column of texts is found; keys found: a, label."),
        ("premise label", {}, "'premise' is the first text of a pair, and there is no 'hypothesis'; keys found: prem"),
        ("sentence1 label", {}, "'sentence1' is the first text of a pair, and there is no 'sentence2'"),
        ("text", {"label": "text"}, "no column of texts is found"),
    ],
)
def test_columns_that_are_not_there(keys: str, named: dict[str, str], sentence: str) -> None:
    with pytest.raises(BadInput, match=re.escape(sentence)) as caught:
        found(keys, **named)
    assert str(caught.value).startswith("x.csv:2: ")
