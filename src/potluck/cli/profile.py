"""``potluck profile``: measure this machine."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, PaceOption, console, print_json


def command(
    job_file: Annotated[Path | None, typer.Argument(metavar="JOB", help="The job, as YAML.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="File of the profile; NAME.profile.json here if left out.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of this device; the host's if left out.")] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Another device's profile, instead of a job: measure the same work; model and data need not be here."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads to compute with; the job's, or one a core, if left out.")
    ] = None,
    pace: PaceOption = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure what this machine can bring to a job: time by share, memory, link. Trains nothing.

    Give a job, or --like.
    """
    from potluck.errors import BadInput

    if (job_file is None) == (like is None):
        raise BadInput("Give a job file, or --like with another device's profile, and not both.")

    from potluck.control.names import host_name
    from potluck.job import load_job
    from potluck.pool.profile import read_profile, write_profile
    from potluck.pool.profiling import profile_job, profile_work
    from potluck.report.profiles import profile_table

    name = host_name() if name is None else name
    if not name or "/" in name or name.startswith("."):
        raise BadInput(f"--name: '{name}' cannot begin the name of a file.")
    file = Path(f"{name}.profile.json") if output is None else output
    if file.is_dir():
        raise BadInput(f"{file} is a directory: name a file for the profile.")
    if not file.absolute().parent.is_dir():
        raise BadInput(f"{file} cannot be written: there is no directory {file.parent}.")
    screen = console(as_json)
    with screen.status(f"Preparing to measure {name}") as status:
        if job_file is not None:
            profile = profile_job(load_job(job_file), name=name, threads=threads, pace=pace, tell=status.update)
        else:
            assert like is not None
            profile = profile_work(read_profile(like).work, name=name, threads=threads, pace=pace, tell=status.update)
    write_profile(profile, file)
    screen.print(profile_table(profile))
    screen.print(f"The profile lies in {file}", highlight=False)
    if as_json:
        print_json({"file": str(file), **profile.model_dump(mode="json")})
