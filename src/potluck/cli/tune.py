"""``potluck tune``: run a job file."""

import os
from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, Nice, Overwrite, PaceOption, console, print_json


def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job, as YAML.")],
    devices: Annotated[
        str | None, typer.Option(help="How many local devices (3), or their shares (3:2:1).", metavar="N|A:B:C")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the result.")] = None,
    overwrite: Overwrite = False,
    peers: Annotated[int, typer.Option(min=0, help="How many other machines join; prints an invite for them.")] = 0,
    name: Annotated[str, typer.Option(help="This machine's name in the pool; its hostname if left out.")] = "",
    address: Annotated[
        str | None,
        typer.Option(help="IP address at which the others reach this machine; that of its default route if left out."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port at which they reach it; any free one if 0.")
    ] = 0,
    invite_minutes: Annotated[float, typer.Option(min=0.1, help="Minutes within which the others must join.")] = 60.0,
    nice: Nice = False,
    pace: PaceOption = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fine-tune a model as a job file says, on local devices or with other machines; options win over the file."""
    from potluck.job import load_job, parse_job

    job = load_job(job_file)
    given = {"devices": devices, "output": output, "overwrite": overwrite or None}
    changes = {field: value for field, value in given.items() if value is not None}
    if changes:
        job = parse_job(job.model_dump() | changes, where="the command line")

    from potluck.pool.crew import Gathering, Manners
    from potluck.pool.launched import serve_launched
    from potluck.pool.ranks import launch_of
    from potluck.pool.tune import tune
    from potluck.report.progress import Live
    from potluck.report.tables import result_table

    manners = Manners(nice, pace)
    launch = launch_of(os.environ)
    if launch is not None and launch.rank != 0:
        serve_launched(job, launch, manners)
        return
    gathering = Gathering(peers, name, address, port, invite_minutes) if peers else None
    screen = console(as_json)
    with Live(screen) as live:
        result = tune(job, gathering=gathering, launch=launch, manners=manners, listener=live)
    screen.print(result_table(result))
    if result.predicted_step_s is not None:
        screen.print(
            f"A step took {result.step_s:.3g} s; the plan predicted {result.predicted_step_s:.3g} s"
            f" ({result.prediction_error:+.0%}).",
            highlight=False,
        )
    what = "model" if job.train == "full" else "adapter"
    screen.print(f"The {what} lies in {result.adapter}", highlight=False)
    if as_json:
        print_json(result.to_json())
