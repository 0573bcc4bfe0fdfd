"""Scores in words and as a table, of models that answer and of those that classify."""

from collections.abc import Sequence

from rich.table import Table

from potluck.models.evaluate import Scores
from potluck.models.evaluate_classes import ClassScores
from potluck.pool.result import Evaluated

_NAMES = {"accuracy": "accuracy", "f1": "F1", "matthews": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}


def in_words(scores: Evaluated) -> str:
    """The scores there are, with the loss last."""
    found = [(name, getattr(scores, field)) for field, name in _NAMES.items()]
    parts = [f"{name} {value:.2f}" for name, value in found if value is not None]
    return ", ".join([*parts, f"loss {scores.loss:.3f}"])


def scores_table(
    scores: Sequence[tuple[str, Scores | ClassScores | None]],
) -> Table:
    """A row for each named evaluation there is, and a column for each score that one of them has."""
    there = [(when, score) for when, score in scores if score is not None]
    table = Table()
    columns = {
        "loss": "{:.4f}",
        "perplexity": "{:.2f}",
        **dict.fromkeys(_NAMES, "{:.3f}"),
        "examples": "{:,}",
        "target_tokens": "{:,}",
    }
    shown = [column for column in columns if any(getattr(score, column, None) is not None for _, score in there)]
    table.add_column("")
    for column in shown:
        table.add_column(_NAMES.get(column, column.replace("_", " ")), justify="right")
    for when, score in there:
        values = ((column, getattr(score, column)) for column in shown)
        table.add_row(when, *("-" if value is None else columns[column].format(value) for column, value in values))
    return table
