"""``potluck audit``: read a contribution as a curious server could."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, console, print_json

_SHOWN = 200  # characters of an example


def command(
    contribution: Annotated[
        Path, typer.Argument(help="What was uploaded: the directory of 'potluck contribute --keep'.")
    ],
    model: Annotated[str, typer.Option(help="The model: a directory, a hub id, or a .gguf file.")],
    data: Annotated[
        str | None, typer.Option(help="Your own file that was contributed, to count what was read rightly.")
    ] = None,
    examples: Annotated[int, typer.Option(help="How many examples to read.")] = 20,
    seed: Annotated[int, typer.Option(help="Which examples are drawn.")] = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find out what the server can read in a contribution: attack it, and say how much of the text comes back."""
    from potluck.report.split_view import SplitView
    from potluck.split.audit import audit

    screen = console(as_json)
    with SplitView(screen) as view:
        found = audit(contribution, model=model, data=data, examples=examples, seed=seed, listener=view)
    for sentence in found.sentences():
        screen.print(sentence, markup=False, highlight=False)
    if data is None:
        for text in found.texts:
            line = " ".join(text.split())
            screen.print(f"  {line[:_SHOWN]}{'...' if len(line) > _SHOWN else ''}", markup=False, highlight=False)
    if as_json:
        print_json(found.to_json())
