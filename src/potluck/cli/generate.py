"""``potluck generate``: answer a prompt with a result, or classify a text with it."""

from pathlib import Path
from typing import Annotated, cast, get_args

import typer

from potluck.cli.output import Debug, Json, print_json
from potluck.errors import BadInput


def command(
    adapter: Annotated[Path, typer.Argument(help="The output directory of 'potluck tune'.")],
    prompt: Annotated[str, typer.Argument(help="A user message where the training data were chats, else the text.")],
    pair: Annotated[str | None, typer.Option(help="The second text, where pairs are classified.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 128,
    written_as: Annotated[
        str, typer.Option("--format", help="Format of the training data, if the job beside the result is not clear.")
    ] = "auto",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Answer a prompt with an adapter (or a model) that potluck trained; a classifier names the class, or the value."""
    from potluck.job_sections import Format
    from potluck.use import generate

    if written_as not in get_args(Format):
        raise BadInput(f"--format: '{written_as}' is none of {', '.join(get_args(Format))}.")
    pairs = None if pair is None else [pair]
    form = cast(Format, written_as)
    answer = generate(adapter, [prompt], pairs=pairs, max_new_tokens=max_new_tokens, format=form)[0]
    if as_json:
        print_json({"prompt": prompt, "answer": answer})
    else:
        typer.echo(answer)
