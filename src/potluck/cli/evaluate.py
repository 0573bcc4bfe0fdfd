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
    """Score an adapter on examples: loss, perplexity, and exact-match accuracy; before and after training."""
    from rich.table import Table

    from potluck.use import evaluate_result

    before, after = evaluate_result(adapter, data)
    table = Table()
    for column in ("", "loss", "perplexity", "accuracy", "examples", "target tokens"):
        table.add_column(column, justify="right" if column else "left")
    for when, scores in (("before", before), ("after", after)):
        if scores is not None:
            accuracy = "-" if scores.accuracy is None else f"{scores.accuracy:.3f}"
            counts = (f"{scores.examples:,}", f"{scores.target_tokens:,}")
            table.add_row(when, f"{scores.loss:.4f}", f"{scores.perplexity:.2f}", accuracy, *counts)
    console(as_json).print(table)
    if as_json:
        print_json({"before": asdict(before) if before else None, "after": asdict(after)})
