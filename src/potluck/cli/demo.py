"""``potluck demo``: a real model learns smart-home commands on three local devices."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, Overwrite, console, print_json


def command(
    seed: Annotated[int, typer.Option(help="Draws the sentences, their order and the adapter.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of 16 examples.")] = 100,
    output: Annotated[Path, typer.Option(help="Gets the data and the adapter.")] = Path("demo-out"),
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Teach SmolLM2 (135M) to understand smart-home commands, on three local devices with shares 3:2:1."""
    from potluck.demo.run import run_demo

    result = run_demo(output, seed=seed, steps=steps, overwrite=overwrite, screen=console(as_json))
    if as_json:
        print_json(result.to_json())
