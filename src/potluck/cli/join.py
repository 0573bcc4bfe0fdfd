"""``potluck join``: take part in somebody else's pool."""

from typing import Annotated

import typer

from potluck.cli.output import Debug, Nice, PaceOption, console, invite_word


def command(
    invite: Annotated[
        str,
        typer.Argument(
            help="What 'potluck tune --peers' printed; - reads it from stdin, so that no list of processes shows it."
        ),
    ],
    data: Annotated[
        list[str] | None, typer.Option(help="Training data to bring; they stay here. May be given several times.")
    ] = None,
    data_may_leave: Annotated[
        bool, typer.Option("--data-may-leave", help="Let the job send them to other devices (data_stays: false).")
    ] = False,
    name: Annotated[str, typer.Option(help="What the others call this device; its hostname if left out.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Threads to compute with; 0: one a core.")] = 0,
    nice: Nice = False,
    pace: PaceOption = None,
    debug: Debug = False,
) -> None:
    """Bring this machine into a pool: it computes its share until the coordinator is done."""
    from potluck.errors import PotluckError
    from potluck.pool.join import Guest, join
    from potluck.report.guest import GuestView

    screen = console(False)
    with GuestView(screen, data_may_leave=data_may_leave) as view:
        ended = join(
            invite_word(invite),
            Guest(name, tuple(data or ()), threads, nice, pace, data_may_leave),
            on_event=view.event,
            tell=view.tell,
        )
    if not ended.ok:
        raise PotluckError(ended.message)
    view.tell(ended.message)
