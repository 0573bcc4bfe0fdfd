"""``potluck bench``: comparisons, each in one go."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from potluck.cli.output import Debug, Json, console, print_json
from potluck.errors import BadInput, SaveFailed

app = typer.Typer(help="Compare ways to train, on this machine, with real processes and sockets.", no_args_is_help=True)


@app.callback()
def _options() -> None: ...


@app.command("split")
def split(
    task: Annotated[str, typer.Option(help="intents, text, or postgres (fetched from Debian).")] = "intents",
    clients: Annotated[int, typer.Option(min=1, help="How many clients.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="How often every example is trained on.")] = 3,
    examples: Annotated[
        int | None, typer.Option(min=3, help="Of the task's, drawn at random; all if left out.")
    ] = None,
    held_out: Annotated[
        int | None, typer.Option(min=1, help="Examples to judge by, drawn at random; all of the task's if left out.")
    ] = None,
    partition: Annotated[
        str, typer.Option(help="How examples lie on clients: iid, dirichlet:ALPHA by label, or topic (one a client).")
    ] = "iid",
    schemes: Annotated[
        str | None,
        typer.Option(help="Which, with commas between; all but fedavg and the losses of clients if left out."),
    ] = None,
    link: Annotated[float, typer.Option(help="Mbit/s of each client, up and down; 0 for no limit.")] = 20.0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples a step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="The highest.")] = None,
    cut: Annotated[int, typer.Option(min=1, help="Blocks on the client's side.")] = 2,
    model: Annotated[str | None, typer.Option(help="Another model than the demo's.")] = None,
    seed: Annotated[int, typer.Option(help="Draws data, order and adapters.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="Of the server and of central training; 0: one a core.")] = 0,
    picture: Annotated[Path | None, typer.Option(help="Draw the result into a .png or .svg file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON into a file, row by row.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train one model with every split scheme, and centrally; compare quality, bytes, client time and memory."""
    from dataclasses import replace

    from potluck.bench.split import Comparison, compare
    from potluck.bench.table import name_of, scheme_table
    from potluck.report.split_view import SplitView

    named = tuple(name.strip() for name in (schemes or "").split(",") if name.strip())
    comparison = Comparison(
        task=task,
        model=model,
        clients=clients,
        epochs=epochs,
        examples=examples,
        held_out=held_out,
        partition=partition,
        link_mbit=link or None,
        batch_size=batch_size,
        learning_rate=learning_rate,
        cut=cut,
        seed=seed,
        threads=threads,
    )
    if schemes is not None:
        comparison = replace(comparison, schemes=named)
    draw = None if picture is None else _drawing()  # refused before it takes hours
    screen = console(as_json)
    rows: list[dict[str, Any]] = []

    def save(result: Mapping[str, Any]) -> None:
        if output is not None:
            try:
                output.write_text(json.dumps(result) + "\n", encoding="utf-8")
            except OSError as error:
                raise SaveFailed(f"{output} cannot be written: {error.strerror}.") from None

    save({"task": task, "link_mbit": link or None, "schemes": rows})  # what cannot be written is told before it is made
    with SplitView(screen) as view:

        def on_row(row: dict[str, Any]) -> None:
            rows.append(row)
            view.tell(f"{name_of(row)}: held-out loss {row['eval_loss']:.4f}")
            save({"task": task, "link_mbit": link or None, "schemes": rows})

        result = compare(
            comparison,
            tell=view.tell,
            on_step=lambda scheme, step, steps: view.progress(f"{scheme}, steps", step, steps) if steps else None,
            on_row=on_row,
        )
    save(result)
    screen.print(scheme_table(result))
    if as_json:
        print_json(result)
    if picture is not None and draw is not None:
        draw(result, picture)
        screen.print(f"Drawn into {picture}", highlight=False)


def _drawing() -> "Callable[[dict[str, Any], Path], None]":
    try:
        from potluck.bench.picture import draw
    except ModuleNotFoundError as error:
        raise BadInput(f"--picture needs the package {error.name}: pip install 'potluck[pictures]'") from None
    return draw
