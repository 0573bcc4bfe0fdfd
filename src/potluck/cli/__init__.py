"""The command ``potluck``: one small file a command, each parses, calls the Python API and prints."""

import signal
import sys
import traceback
from types import FrameType
from typing import Annotated, NoReturn

import typer

from potluck import __version__
from potluck.cli import (
    audit,
    bench,
    contribute,
    demo,
    evaluate,
    families,
    fetch,
    generate,
    join,
    merge,
    plan,
    profile,
    serve,
    testbed,
    train,
    tune,
)
from potluck.errors import PotluckError

_INTERRUPTED = 130

app = typer.Typer(
    name="potluck",
    help="Fine-tune language models on the CPU devices people already have: each device brings what it can.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("tune")(tune.command)
app.command("join")(join.command)
app.command("profile")(profile.command)
app.command("plan")(plan.command)
app.command("families")(families.command)
app.command("serve")(serve.command)
app.command("contribute")(contribute.command)
app.command("train")(train.command)
app.command("fetch")(fetch.command)
app.command("audit")(audit.command)
app.command("generate")(generate.command)
app.command("eval")(evaluate.command)
app.command("merge")(merge.command)
app.command("demo")(demo.command)
app.add_typer(bench.app, name="bench")
app.add_typer(testbed.app, name="testbed")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"potluck {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Run the command line and leave the process: 0 done, 2 the person's input, 130 Ctrl-C, 1 anything else."""
    debug = "--debug" in sys.argv
    signal.signal(signal.SIGTERM, _terminated)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, _terminated)
    try:
        app()
    except SystemExit as left:
        if left.code == _INTERRUPTED:  # what typer makes of Ctrl-C
            _leave("Interrupted; every device was ended and nothing was saved.", _INTERRUPTED)
        raise
    except PotluckError as error:
        _leave(str(error), error.exit_code, error if debug else None)
    except Exception as error:
        hint = "" if debug else "\nThis is a fault of potluck; --debug shows the traceback."
        _leave(f"Unexpected {type(error).__name__}: {error}{hint}", 1, error if debug else None)
    sys.exit(0)


def _leave(message: str, status: int, shown: BaseException | None = None) -> NoReturn:
    if shown is not None:
        traceback.print_exception(shown)
    print(f"potluck: {message}", file=sys.stderr)
    sys.exit(status)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    """Leave by unwinding, so that devices are ended and temporary directories removed."""
    sys.exit(128 + number)
