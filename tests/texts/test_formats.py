"""Records of each format, and the sentence for each thing that can be wrong with one."""

import re

import pytest
from sources import TURNS, content_of

from potluck.errors import BadInput
from potluck.job_sections import Format
from potluck.texts.formats import Document, parse_record

FORMATS: list[tuple[object, str, object]] = [
    (
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}], "id": 7},
        "messages",
        TURNS,
    ),
    (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "model", "content": "yes"},
            ]
        },
        "messages",
        TURNS,
    ),
    ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, "conversations", TURNS),
    ({"instruction": "do", "input": "it", "output": "done"}, "instruction", ("do", "it", "done")),
    ({"instruction": "do", "output": "done"}, "instruction", ("do", "", "done")),
    ({"instruction": "do", "input": None, "output": "done"}, "instruction", ("do", "", "done")),
    ({"prompt": "p", "completion": "c", "text": "other"}, "prompt", ("p", "c")),
    ({"text": "t", "label": "TurnOn"}, "label", ("t", "TurnOn")),
    ({"text": "t", "label": 3}, "label", ("t", "3")),
    ({"text": "t", "label": False}, "label", ("t", "false")),
    ({"text": "t"}, "text", ("t",)),
    ({"text": "t", "label": None}, "text", ("t",)),
]


@pytest.mark.parametrize(("record", "format", "content"), FORMATS)
def test_formats_are_found_by_their_keys(record: object, format: Format, content: object) -> None:
    for named in ("auto", format):
        row = parse_record(record, named, "x.jsonl:1")
        assert (row.format, row.where, content_of(row)) == (format, "x.jsonl:1", content)


def test_a_named_format_wins() -> None:
    assert parse_record({"text": "t", "label": "x"}, "text", "x:1") == Document("t", "x:1", "text")


@pytest.mark.parametrize(
    ("record", "format", "sentence"),
    [
        ([1], "auto", "expected an object with named values, found a list. Accepted are: messages | "),
        (None, "auto", "expected an object with named values, found null."),
        ("a", "messages", "expected an object with named values, found a string."),
        ({"question": 1, "answer": 2}, "auto", "no known format has the keys found: question, answer. Accepted are"),
        ({}, "auto", "no known format has the keys found: none."),
        ({"text": None}, "auto", "the keys found: text (null)."),
        ({"text": "t"}, "label", "format 'label' needs 'text' and 'label'; keys found: text."),
        ({"text": 5}, "auto", "'text' must be a string, found the number 5."),
        ({"prompt": "a", "completion": ["b"]}, "auto", "'completion' must be a string, found a list."),
        ({"instruction": "a", "output": True}, "auto", "'output' must be a string, found true or false."),
        ({"text": "a", "label": 0.5}, "auto", "'label' must be a name or a whole number, found the number 0.5."),
        ({"text": "a", "label": " "}, "auto", "'label' must be a name or a whole number, found an empty string."),
        ({"text": "a\ud83d"}, "auto", r"'text' holds \ud83d, half of a surrogate pair"),
        ({"messages": "hi"}, "auto", "'messages' must be a list of turns, found a string."),
        ({"messages": []}, "auto", "'messages' is an empty list."),
        ({"messages": ["hi"]}, "auto", "turn 1 of 'messages' must be an object, found a string."),
        ({"messages": [{"role": "user"}]}, "auto", "turn 1 of 'messages' needs 'role' and 'content', or"),
        ({"messages": [{"role": "owl", "content": "a"}]}, "auto", "has the unknown role 'owl'; known are system,"),
        ({"messages": [{"role": "user", "content": None}]}, "auto", "'content' of turn 1 of 'messages' must be a str"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "auto", "not text (image)"),
    ],
)
def test_wrong_records_are_named(record: object, format: Format, sentence: str) -> None:
    with pytest.raises(BadInput, match=re.escape(sentence)) as caught:
        parse_record(record, format, "x.jsonl:17")
    assert str(caught.value).startswith("x.jsonl:17: ")
