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
            _save(output, result)

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


@app.command("pool")
def pool(
    devices: Annotated[str, typer.Option("--set", help="A 1.42:1:1, B 1.42:1.2:1:1, C of five, D 4:2:1:1.")] = "A",
    shape: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, smollm2-360m, llama-1b, mobilellama-1.4b, gpt2-medium or roberta-base; random weights."
        ),
    ] = "llama-1b",
    layers: Annotated[int | None, typer.Option(min=1, help="The shape's first blocks; all if left out.")] = None,
    train: Annotated[str, typer.Option(help="lora or full.")] = "lora",
    dtype: Annotated[str, typer.Option(help="What linears compute in: fp32 or bf16.")] = "fp32",
    steps: Annotated[int, typer.Option(min=1, help="Of each strategy, after one to warm up.")] = 6,
    rows: Annotated[int, typer.Option(help="Of each step.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens of each row.")] = 128,
    load: Annotated[float, typer.Option(help="Cores that all devices together compute on.")] = 1.5,
    mbit: Annotated[float, typer.Option(help="Mbit/s of each device's link, each way.")] = 1000.0,
    strategies: Annotated[str | None, typer.Option(help="Which, with commas between; all if left out.")] = None,
    prefix: Annotated[str, typer.Option(help="What the names of the testbed begin with.")] = "potluck",
    picture: Annotated[Path | None, typer.Option(help="Draw where time goes into a .png or .svg file.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write the result as JSON into a file.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Step every strategy of a pool in turn on the same emulated devices. Needs root, and an idle machine."""
    from dataclasses import replace

    from potluck.bench.pool import Comparison, compare
    from potluck.bench.pool_table import pool_table, ratio_table, sentences
    from potluck.report.split_view import SplitView

    comparison = Comparison(
        set=devices,
        shape=shape,
        layers=layers,
        train=train,
        dtype=dtype,
        steps=steps,
        rows=rows,
        length=length,
        load=load,
        mbit=mbit,
        prefix=prefix,
    )
    if strategies is not None:
        named = tuple(name.strip() for name in strategies.split(",") if name.strip())
        comparison = replace(comparison, strategies=named)
    draw = None if picture is None else _drawing_pool(picture)
    screen = console(as_json)
    if output is not None:
        _save(output, {})
    with SplitView(screen) as view:
        result = compare(
            comparison,
            tell=view.tell,
            on_step=lambda name, done, total: view.progress("Steps", done, total),
        )
    if output is not None:
        _save(output, result)
    screen.print(pool_table(result))
    screen.print(ratio_table(result))
    for sentence in sentences(result):
        screen.print(sentence, markup=False, highlight=False)
    if as_json:
        print_json(result)
    if picture is not None and draw is not None:
        draw(result, picture)
        screen.print(f"Drawn into {picture}", highlight=False)


def _save(output: Path, result: Mapping[str, Any]) -> None:
    try:
        output.write_text(json.dumps(result) + "\n", encoding="utf-8")
    except OSError as error:
        raise SaveFailed(f"{output} cannot be written: {error.strerror}.") from None


def _drawing_pool(picture: Path) -> "Callable[[Mapping[str, Any], Path], None]":
    try:
        from potluck.bench.picture import check_suffix
        from potluck.bench.pool_picture import draw
    except ModuleNotFoundError as error:
        raise _without(error) from None
    check_suffix(picture)
    return draw


def _without(error: ModuleNotFoundError) -> BadInput:
    return BadInput(f"--picture needs the package {error.name}: pip install 'potluck[pictures]'")


def _drawing() -> "Callable[[dict[str, Any], Path], None]":
    try:
        from potluck.bench.picture import draw
    except ModuleNotFoundError as error:
        raise _without(error) from None
    return draw
