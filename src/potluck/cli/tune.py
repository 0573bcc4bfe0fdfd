"""``potluck tune``: run a job file."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, Overwrite, console, print_json


def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job, as YAML.")],
    devices: Annotated[
        str | None, typer.Option(help="How many local devices (3), or their shares (3:2:1).", metavar="N|A:B:C")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Directory of the result.")] = None,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Fine-tune a model on local devices, as a job file says; options win over the file."""
    from potluck.job import load_job, parse_job

    job = load_job(job_file)
    given = {"devices": devices, "output": output, "overwrite": overwrite or None}
    changes = {field: value for field, value in given.items() if value is not None}
    if changes:
        job = parse_job(job.model_dump() | changes, where="the command line")

    from potluck.pool.tune import tune
    from potluck.report.progress import Live
    from potluck.report.tables import result_table

    screen = console(as_json)
    with Live(screen) as live:
        result = tune(job, listener=live)
    screen.print(result_table(result))
    what = "adapter" if job.train == "lora" else "model"
    screen.print(f"The {what} lies in {result.adapter}", highlight=False)
    if as_json:
        print_json(result.to_json())
