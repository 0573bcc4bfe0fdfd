"""``potluck fetch``: get the adapter that a server of split training has made."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, Overwrite, console, invite_word, print_json


def command(
    invite: Annotated[str, typer.Argument(help="What 'potluck serve' printed; - reads it from stdin.")],
    output: Annotated[Path, typer.Option(help="Directory for the adapter.")] = Path("adapter"),
    name: Annotated[str, typer.Option(help="What the server calls this client; its hostname if left out.")] = "",
    model: Annotated[
        str | None, typer.Option(help="The whole model on this machine, which the adapter is then used with.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fetch the adapter; using it needs the whole model on this machine."""
    from potluck.report.split_view import SplitView
    from potluck.split.client import Client, fetch

    with SplitView(console(as_json)) as view:
        fetch(
            invite_word(invite),
            output,
            Client(name=name, model=model),
            overwrite=overwrite,
            listener=view,
        )
    if as_json:
        print_json({"adapter": str(output)})
