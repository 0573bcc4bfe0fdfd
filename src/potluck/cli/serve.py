"""``potluck serve``: the server of split training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.output import Debug, Interrupted, Json, Overwrite, console, print_json

if TYPE_CHECKING:
    from potluck.split.result import Outcome


def command(
    job_file: Annotated[Path, typer.Argument(metavar="JOB", help="The job, as YAML, with a 'split' section.")],
    train_when: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train as soon as N clients have contributed.")
    ] = None,
    exit_when_trained: Annotated[
        bool, typer.Option("--exit-when-trained", help="Leave after training instead of handing out the adapter.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(help="IP address at which clients reach this machine; that of its default route if left out."),
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="TCP port; any free one the first time, and the same later, if 0.")
    ] = 0,
    overwrite: Overwrite = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Take contributions of clients: prints an invite for them, and goes on until Ctrl-C."""
    from potluck.job import load_job
    from potluck.report.split_view import SplitView, quality_table
    from potluck.split.serve import Serving, serve
    from potluck.split.settings import store_dir

    job = load_job(job_file)
    job = job.model_copy(update={"overwrite": job.overwrite or overwrite})
    screen = console(as_json)
    trained: list[Outcome] = []

    def until(outcome: "Outcome | None") -> bool:
        if outcome is not None and not trained:
            trained.append(outcome)
            if outcome.after:
                screen.print(quality_table(outcome.before, outcome.after))
            screen.print(
                f"The adapter lies in {outcome.adapter}; clients get it with 'potluck fetch'.", highlight=False
            )
            if as_json:
                print_json(outcome.to_json())
        return exit_when_trained and bool(trained)

    try:
        with SplitView(screen) as view:
            serve(job, Serving(train_when, address, port), listener=view, until=until)
    except KeyboardInterrupt:
        kept = f"What was contributed is kept in {store_dir(job)}"
        if job.split is not None and job.split.scheme != "one-shot":
            kept = "What was trained is saved" if trained else "Nothing was saved: step schemes begin again"
        raise Interrupted(f"Stopped. {kept}; started again, the server has the same invite.") from None
