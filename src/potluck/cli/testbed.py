"""``potluck testbed``: emulated devices on this machine."""

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.cli.output import Debug, Json, console, print_json

if TYPE_CHECKING:
    from potluck.testbed import Testbed

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red", "bright_cyan", "bright_magenta")

app = typer.Typer(
    help="Emulated devices on this machine: speeds, links and memory as you say. Needs root; no traffic leaves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

Prefix = Annotated[str, typer.Option("--prefix", help="What its names begin with; a second testbed needs another one.")]


@app.command("up")
def up(
    speeds: Annotated[
        str,
        typer.Option(
            help="Speeds in proportion, as 1.42:1:1. Scaled to at most one core each, and --load of all cores together."
        ),
    ],
    link: Annotated[str, typer.Option(help="Rate of each device's link, as 100mbit or 1gbit.")],
    load: Annotated[
        float, typer.Option(help="Part of the cores that all devices together compute on; messages need the rest.")
    ] = 0.9,
    memory: Annotated[str | None, typer.Option(help="Memory limit of each device, as 4GiB, or 4GiB:2GiB:none.")] = None,
    names: Annotated[str | None, typer.Option(help="Host names, as hub:cam-1:cam-2.")] = None,
    private: Annotated[
        list[Path] | None,
        typer.Option(
            help="A folder that devices do not share: each has its own there, empty at first. May be given again."
        ),
    ] = None,
    prefix: Prefix = "potluck",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Set up emulated devices: network namespaces, links of a rate, memory limits."""
    from potluck import testbed
    from potluck.testbed.options import parse_memory, parse_names, parse_rate, parse_speeds

    ratios = parse_speeds(speeds)
    _show(
        testbed.up(
            ratios,
            parse_rate(link),
            names=parse_names(names, len(ratios)),
            memory_bytes=parse_memory(memory, len(ratios)),
            private=private or (),
            load=load,
            prefix=prefix,
        ),
        as_json,
    )


@app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run(
    argv: Annotated[
        list[str],
        typer.Argument(
            metavar="CMD",
            help="The command, after --. {name} {speed} {address} {rank} {world_size} in it become each device's own.",
        ),
    ],
    device: Annotated[list[str] | None, typer.Option(help="Run on this device only; may be given again.")] = None,
    prefix: Prefix = "potluck",
    debug: Debug = False,
) -> None:
    """Run a command on every device at once; the exit status is the first that is not 0."""
    from rich.console import Console
    from rich.text import Text

    from potluck import testbed
    from potluck.testbed.run import Ended, Stream
    from potluck.testbed.state import TestDevice

    bed = testbed.read(prefix)
    chosen = bed.chosen(device or [])
    width = max(len(each.name) for each in chosen)
    consoles = {stream: Console(stderr=stream is Stream.ERROR, soft_wrap=True, highlight=False) for stream in Stream}
    alone = threading.Lock()

    def show(where: TestDevice, stream: Stream, line: str) -> None:
        prefixed = Text(f"{where.name:<{width}} | ", style=_COLOURS[where.rank % len(_COLOURS)])
        with alone:
            consoles[stream].print(prefixed.append_text(Text.from_ansi(line)))

    def tell(ended: Ended) -> None:
        if ended.returncode != 0:
            show(ended.device, Stream.ERROR, ended.in_words())

    raise typer.Exit(testbed.run(bed, argv, show, tell, devices=chosen))


@app.command("down")
def down(prefix: Prefix = "potluck", debug: Debug = False) -> None:
    """Remove the devices, or what is left of them, and end what runs on them."""
    from potluck import testbed

    typer.echo("The testbed is down." if testbed.down(prefix) else "No testbed was up.")


@app.command("status")
def status(prefix: Prefix = "potluck", as_json: Json = False, debug: Debug = False) -> None:
    """Show the devices that are up."""
    from potluck import testbed

    _show(testbed.read(prefix), as_json)


@app.command("calibrate")
def calibrate(
    burst_ms: Annotated[
        float, typer.Option(help="Milliseconds of computing between two messages, as in the job to be run.")
    ] = 4.0,
    seconds: Annotated[float, typer.Option(help="Seconds to measure for.")] = 5.0,
    prefix: Prefix = "potluck",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check, while all devices compute as a job does, that each is within 5 % of its speed."""
    from rich.table import Table

    from potluck import testbed

    calibrations = testbed.calibrate(testbed.read(prefix), burst_ms=burst_ms, seconds=seconds)
    table = Table("device", "speed", "achieved", "off by")
    for each in calibrations:
        table.add_row(each.name, f"{each.speed:.3f}", f"{each.achieved:.3f}", f"{each.error:+.1%}")
    console(as_json).print(table)
    if as_json:
        fields = [{"name": each.name, "speed": each.speed, "achieved": each.achieved} for each in calibrations]
        print_json({"devices": fields})


def _show(testbed: "Testbed", as_json: bool) -> None:
    from rich.table import Table

    table = Table("device", "rank", "speed", "address", "memory", "namespace")
    for each in testbed.devices:
        memory = "all" if each.memory_bytes is None else f"{each.memory_bytes / (1 << 20):,.0f} MiB"
        table.add_row(each.name, str(each.rank), f"{each.speed:.3f}", each.address, memory, each.namespace)
    console(as_json).print(table)
    if as_json:
        print_json(testbed.model_dump(mode="json"))
