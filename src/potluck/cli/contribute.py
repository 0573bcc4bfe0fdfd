"""``potluck contribute``: give examples to a server of split training, as activations."""

from pathlib import Path
from typing import Annotated

import typer

from potluck.cli.output import Debug, Interrupted, Json, Overwrite, console, invite_word, print_json


def command(
    invite: Annotated[
        str,
        typer.Argument(
            help="What 'potluck serve' printed; - reads it from stdin, so that no list of processes shows it."
        ),
    ],
    data: Annotated[
        list[str] | None, typer.Argument(help="Examples, in any format that 'potluck tune' reads; the texts stay here.")
    ] = None,
    holdout: Annotated[
        str, typer.Option(metavar="N|N%", help="Examples to judge by instead of training on them: a part or a number.")
    ] = "0",
    name: Annotated[str, typer.Option(help="What the server calls this client; its hostname if left out.")] = "",
    model: Annotated[
        str | None, typer.Option(help="A copy of the model on this machine; else its first blocks are fetched.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the adapter and fetch it (to --output).")] = False,
    output: Annotated[Path, typer.Option(help="Directory for the adapter.")] = Path("adapter"),
    overwrite: Overwrite = False,
    send_ids: Annotated[
        bool, typer.Option("--send-ids", help="Let the server have token ids, if its job says 'targets: ids'.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Keep a copy of what was uploaded in this directory, for 'potluck audit'.")
    ] = None,
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Have the server delete all that this client contributed.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Contribute examples: their activations are computed here and uploaded once; texts and token ids stay here."""
    from potluck.errors import BadInput
    from potluck.report.split_view import SplitView
    from potluck.split.client import Client, contribute
    from potluck.split.client import withdraw as withdraw_all

    word = invite_word(invite)
    client = Client(name=name, model=model, holdout=holdout, send_ids=send_ids, keep=keep)
    screen = console(as_json)
    if withdraw:
        who = withdraw_all(word, client)
        screen.print(f"The server has deleted all that {who} contributed.", highlight=False)
        if as_json:
            print_json({"withdrawn": who})
        return
    if not data:
        raise BadInput("Name the examples to contribute: potluck contribute INVITE data.jsonl.")
    try:
        with SplitView(screen) as view:
            done = contribute(word, data, client, output=output if wait else None, overwrite=overwrite, listener=view)
    except KeyboardInterrupt:
        raise Interrupted("Interrupted. Run the same command again, and it goes on where it was.") from None
    sent = sum(done.bytes["sent"].values()) / 2**20
    screen.print(
        f"Contributed {done.examples:,} examples as {done.name}: {sent:,.1f} MiB in {done.active_s:.0f} s.",
        highlight=False,
    )
    if as_json:
        print_json(done.to_json())
