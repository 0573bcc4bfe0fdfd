"""``potluck eval``: score a result on held-out examples, before and after training."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, console, print_json


def command(
    adapter: Annotated[Path, typer.Argument(help="The output directory of 'potluck tune'.")],
    data: Annotated[list[str], typer.Argument(help="Examples, in any format that 'potluck tune' reads.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Score an adapter on examples, before and after training.

    Of answers: loss, perplexity and exact-match accuracy. Of classes: loss, accuracy, F1 and Matthews correlation. Of
    values: squared error, Pearson and Spearman correlation.
    """
    from potluck.report.scores import scores_table
    from potluck.use import evaluate_result

    before, after = evaluate_result(adapter, data)
    console(as_json).print(scores_table([("before", before), ("after", after)]))
    if as_json:
        print_json({"before": asdict(before) if before else None, "after": asdict(after)})
