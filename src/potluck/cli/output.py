"""What all commands share: their common options, and where their output goes."""

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.errors import PotluckError

if TYPE_CHECKING:
    from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and what devices wrote to standard error.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what the output directory holds.")]

Nice = Annotated[
    bool, typer.Option("--nice", help="Low priority and half of the cores, for machines that people use meanwhile.")
]
PaceOption = Annotated[
    float | None,
    typer.Option(
        "--pace",
        metavar="SPEED",
        help="Emulate a slower device: its speed as a part of one core, above 0 and at most 1.",
    ),
]


class Interrupted(PotluckError):
    """Ctrl-C, where more is to be said than that everything ended."""

    exit_code = 130


def invite_word(given: str) -> str:
    """An invite as it was given, or, for ``-``, the next line of stdin: no list of processes shows that."""
    return sys.stdin.readline().strip() if given == "-" else given


def console(as_json: bool) -> "Console":
    """Where people read: stdout, or stderr where stdout is for JSON."""
    from rich.console import Console

    return Console(stderr=as_json, soft_wrap=True)


def print_json(fields: Mapping[str, object]) -> None:
    """One JSON object on a line of stdout."""
    typer.echo(json.dumps(fields, ensure_ascii=False))
