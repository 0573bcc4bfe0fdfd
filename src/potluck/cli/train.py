"""``potluck train``: train on what clients have contributed."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Interrupted, Json, Overwrite, console, print_json


def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The server's job, as YAML.")],
    further: Annotated[
        bool,
        typer.Option(
            "--continue", help="Begin with the adapter of the last training, on the whole store; replaces it."
        ),
    ] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train the adapter on all contributions; a training that was ended goes on from its last checkpoint."""
    from potluck.job import load_job
    from potluck.report.split_view import SplitView, quality_table
    from potluck.split.trainer import train_store

    job = load_job(job_file)
    job = job.model_copy(update={"overwrite": job.overwrite or overwrite})
    screen = console(as_json)
    try:
        with SplitView(screen) as view:
            outcome = train_store(job, further=further, listener=view)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command again: it goes on from the last checkpoint.") from None
    if outcome is None:
        return  # another process of the same training tells
    if outcome.after:
        screen.print(quality_table(outcome.before, outcome.after))
    else:
        screen.print(
            "No client held examples back (contribute --holdout), so that nothing was judged.", highlight=False
        )
    screen.print(f"The adapter lies in {outcome.adapter}", highlight=False)
    if as_json:
        print_json(outcome.to_json())
