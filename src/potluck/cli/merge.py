"""``potluck merge``: an adapter and its base model as one plain checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, Overwrite, console, print_json


def command(
    adapter: Annotated[Path, typer.Argument(help="The output directory of 'potluck tune'.")],
    output: Annotated[Path, typer.Argument(help="Directory of the checkpoint.")],
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Merge an adapter into its base model: a plain Hugging Face checkpoint that needs no PEFT."""
    from potluck.use import merge_result

    merge_result(adapter, output, overwrite=overwrite)
    console(as_json).print(f"The merged model lies in {output}", highlight=False)
    if as_json:
        print_json({"model": str(output)})
