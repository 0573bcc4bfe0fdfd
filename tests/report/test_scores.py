"""Scores as people read them."""

import io

from rich.console import Console

from potluck.models.evaluate import Scores
from potluck.models.evaluate_classes import ClassScores
from potluck.pool.result import Evaluated
from potluck.report.scores import in_words, scores_table

CLASSES = ClassScores(0.25, accuracy=0.9, f1=0.8, matthews=0.7, pearson=None, spearman=None, examples=1234)
VALUES = ClassScores(2.5, accuracy=None, f1=None, matthews=None, pearson=-0.123, spearman=None, examples=7)


def lines(*scores: tuple[str, Scores | ClassScores | None]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=120)
    console.print(scores_table(scores))
    assert isinstance(console.file, io.StringIO)
    split = (line.replace("┃", "│").split("│")[1:-1] for line in console.file.getvalue().splitlines())
    return [[cell.strip() for cell in line] for line in split if line]


def test_words() -> None:
    assert in_words(Evaluated.of(CLASSES)) == "accuracy 0.90, F1 0.80, Matthews 0.70, loss 0.250"
    assert in_words(Evaluated.of(VALUES)) == "Pearson -0.12, loss 2.500"
    assert in_words(Evaluated(None, 3.5)) == "loss 3.500"


def test_a_table_has_the_scores_that_there_are() -> None:
    assert lines(("before", None), ("after", CLASSES)) == [
        ["", "loss", "accuracy", "F1", "Matthews", "examples"],
        ["after", "0.2500", "0.900", "0.800", "0.700", "1,234"],
    ]
    answers = Scores(1.0, 2.718, 0.5, 10, 2000)
    unanswered = Scores(2.0, 7.389, None, 10, 2000)
    assert lines(("before", unanswered), ("after", answers)) == [
        ["", "loss", "perplexity", "accuracy", "examples", "target tokens"],
        ["before", "2.0000", "7.39", "-", "10", "2,000"],
        ["after", "1.0000", "2.72", "0.500", "10", "2,000"],
    ]
