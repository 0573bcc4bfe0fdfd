"""Which columns of a table hold the text, perhaps a second one, and the label: named in the job, or found."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from potluck.errors import BadInput
from potluck.job_sections import Data, Task
from potluck.texts.values import keys_of

_PAIRS = (
    ("text", "text_pair"),
    ("text1", "text2"),
    ("text_a", "text_b"),
    ("sentence1", "sentence2"),
    ("sentence_a", "sentence_b"),
    ("sentence_A", "sentence_B"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("query", "passage"),
    ("query", "document"),
)
_HALVES = ("text1", "text_a", "sentence1", "sentence_a", "sentence_A", "premise", "question1")
"""First columns of pairs that make no sense without the second."""
_TEXTS = ("text", "sentence", "question", "query", "review", "content", "document", "body", "message", "utterance")
_CLASSES = ("label", "labels", "class", "category", "intent", "topic", "sentiment", "target")
_VALUES = ("label", "labels", "score", "similarity_score", "value", "rating", "target")


@dataclass(frozen=True)
class Columns:
    """The names of the columns of one source."""

    text: str
    text_pair: str | None
    """None where each row has one text."""
    label: str


def find_columns(record: Mapping[object, object], data: Data, task: Task, where: str, *, others: bool) -> Columns:
    """The columns that ``data`` names; those it leaves out are found by their names.

    Args:
        record: the first of a source.
        data: its ``text``, ``text_pair`` and ``label``.
        task: classification or regression: what the label is called differs.
        where: the record's source for messages.
        others: whether a source that lacks a named column may call its columns otherwise, so that all are found: a
            result is also judged by files that do not look like those it was made from.

    Raises:
        BadInput: a named column is not there, none is found, or only the first column of a pair is.
    """
    named = {"text": data.text, "text_pair": data.text_pair, "label": data.label}
    absent = [(field, column) for field, column in named.items() if column is not None and column not in record]
    if absent and not others:
        field, column = absent[0]
        raise BadInput(f"{where}: data.{field} names the column '{column}'; keys found: {keys_of(record)}.")
    if absent:
        named = dict.fromkeys(named)
    label = named["label"] or _first(record, _VALUES if task == "sequence-regression" else _CLASSES, named.values())
    if label is None:
        raise BadInput(
            f"{where}: no column of labels is found; keys found: {keys_of(record)}. Name it in data.label, or call it "
            f"{_or(_VALUES if task == 'sequence-regression' else _CLASSES)}."
        )
    text, pair = _texts(record, named["text"], named["text_pair"], label)
    if text is None:
        raise BadInput(
            f"{where}: no column of texts is found; keys found: {keys_of(record)}. Name it in data.text (and that of a "
            f"second text in data.text_pair), or call it {_or(_TEXTS)}."
        )
    if named["text"] is None and pair is None and text in _HALVES:
        partner = next(second for first, second in _PAIRS if first == text)
        raise BadInput(
            f"{where}: '{text}' is the first text of a pair, and there is no '{partner}'; keys found: "
            f"{keys_of(record)}. Name the second in data.text_pair, or data.text: {text} if it stands alone."
        )
    return Columns(text, pair, label)


def _texts(
    record: Mapping[object, object], text: str | None, pair: str | None, label: str
) -> tuple[str | None, str | None]:
    if text is not None:
        return text, pair
    if pair is not None:
        return _first(record, (*_HALVES, *_TEXTS), (pair, label)), pair
    for first, second in _PAIRS:
        if first in record and second in record and label not in (first, second):
            return first, second
    return _first(record, (*_TEXTS, *_HALVES), (label,)), None


def _first(record: Mapping[object, object], names: Sequence[str], taken: Collection[str | None]) -> str | None:
    return next((name for name in names if name in record and name not in taken), None)


def _or(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
