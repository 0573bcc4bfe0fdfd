"""``potluck plan``: what devices would do with a job, from their profiles."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Json, console, print_json


def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job, as YAML.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="PROFILE", help="The same as --profiles.", show_default=False)
    ] = None,
    profiles: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PROFILE...",
            help="Files that 'potluck profile' wrote; the first has the data. A file named twice is two such devices.",
        ),
    ] = None,
    link: Annotated[
        str | None,
        typer.Option(help="Rate between devices, such as 1gbit or 100mbit. Left out: what the profiles say, or 1gbit."),
    ] = None,
    latency: Annotated[str | None, typer.Option(help="Time that a message takes at least, such as 0.3ms.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Compare ways to share a job among profiled devices: predicted step time, memory, and who would hold what.

    Nothing is sent, and nothing is trained.
    """
    from potluck.job import load_job
    from potluck.pool.what_if import what_if
    from potluck.report.plans import candidates_table, impossible, plans_json, predicted_table

    found = what_if(load_job(job_file), [*(profiles or ()), *(more or ())], link=link, latency=latency)
    screen = console(as_json)
    for note in found.notes:
        screen.print(note, highlight=False, markup=False)
    screen.print(candidates_table(found.candidates, found.best))
    for reason in impossible(found.candidates):
        screen.print(reason, highlight=False, markup=False)
    screen.print(predicted_table(found.best))
    for sentence in (found.best.reason, found.if_data_moved):
        if sentence:
            screen.print(sentence, highlight=False, markup=False)
    if as_json:
        print_json(plans_json(found.candidates, found.best, found.if_data_moved, found.notes))
