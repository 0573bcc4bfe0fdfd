"""The comparison of split schemes on one model, one task, the same clients and the same seed, top to bottom."""

import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from potluck.bench.partition import partition
from potluck.bench.schemes import DEFAULT, SCHEMES, Common, run_scheme
from potluck.bench.tasks import drawn, load_task, write_clients
from potluck.demo.run import model_file
from potluck.errors import BadInput
from potluck.models.source import resolve
from potluck.pool.tune import tune
from potluck.texts.batch import Example
from potluck.texts.formats import Row
from potluck.texts.tokenizer import load_tokenizer
from potluck.use import encode_for, inference_dtype, score

CENTRAL, FEDAVG = "central", "fedavg"


@dataclass(frozen=True)
class Comparison:
    """What is compared, and on what."""

    task: str = "intents"
    model: str | None = None
    """The demo's SmolLM2-135M-Instruct if left out."""
    clients: int = 3
    epochs: int = 3
    examples: int | None = None
    """Of the task's, drawn at random; all if left out."""
    held_out: int | None = None
    """Of the task's held-out examples, drawn at random; all if left out."""
    partition: str = "iid"
    schemes: tuple[str, ...] = (CENTRAL, *DEFAULT)
    link_mbit: float | None = 20.0
    """Of each client, up and down; None for as fast as this machine is."""
    batch_size: int | None = None
    """Examples a step; 4 of text and 16 of commands if left out."""
    learning_rate: float | None = None
    """5e-4 for text and 1e-3 for commands if left out."""
    cut: int = 2
    seed: int = 0
    threads: int = 0
    """Of the server, and of central training; 0 for one a core."""


def compare(
    comparison: Comparison,
    *,
    tell: Callable[[str], None] = lambda text: None,
    on_step: Callable[[str, int, int], None] = lambda scheme, step, steps: None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Run every scheme, one after the other, and judge each adapter with stock transformers and peft.

    Args:
        comparison: what and on what.
        tell: told what goes on.
        on_step: told scheme, step and steps.
        on_row: told each row as soon as it is there.

    Returns:
        ``task``, ``link_mbit`` and ``schemes``, a row each, with what the comparison was made of.

    Raises:
        BadInput: a name is unknown, or a package that is needed is missing.
        PotluckError: a process of a scheme ended.
    """
    _check(comparison)
    model_dir = resolve(comparison.model or str(model_file()), tell=tell)
    tokenizer = load_tokenizer(model_dir)
    task = load_task(comparison.task, tokenizer, seed=comparison.seed, examples=comparison.examples)
    parts = partition(task.labels, comparison.clients, comparison.partition, comparison.seed)
    answered = "prompt" in task.train[0]
    batch_size = comparison.batch_size or (16 if answered else 4)
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as directory:
        base = Path(directory)
        common = Common(
            model_dir=model_dir,
            client_files=tuple(write_clients(task, parts, base)),
            max_length=task.max_length,
            cut=comparison.cut,
            steps=max(1, math.ceil(comparison.epochs * len(task.train) / batch_size)),
            batch_size=batch_size,
            learning_rate=comparison.learning_rate or (1e-3 if answered else 5e-4),
            seed=comparison.seed,
            link_mbit=comparison.link_mbit,
            threads=comparison.threads,
            format="prompt" if answered else "text",
        )
        judged_by = drawn(task.held_out_rows(), comparison.held_out, comparison.seed)
        held_out = encode_for(model_dir, judged_by, common.job(base, None).data)
        tell(
            f"{len(task.train):,} examples on {comparison.clients} clients ({comparison.partition}), {len(held_out):,}"
            f" held out; {common.steps:,} steps of {batch_size} in every scheme."
        )
        rows = []
        untrained = _judged(model_dir, None, held_out)
        for name in comparison.schemes:
            scratch = base / name
            scratch.mkdir()
            told = partial(on_step, name)
            row = _run(name, common, judged_by, comparison, scratch, told)
            row |= _judged(model_dir, scratch / "out", held_out)
            rows.append(row)
            on_row(row)
    return {
        "task": task.name,
        "link_mbit": comparison.link_mbit,
        "partition": comparison.partition,
        "clients": comparison.clients,
        "epochs": comparison.epochs,
        "steps": common.steps,
        "batch_size": batch_size,
        "cut": comparison.cut,
        "seed": comparison.seed,
        "untrained": untrained,
        "schemes": rows,
    }


def _run(
    name: str,
    common: Common,
    judged_by: Sequence[Row],
    comparison: Comparison,
    scratch: Path,
    on_step: Callable[[int, int], None],
) -> dict[str, Any]:
    if name == CENTRAL:
        return _central(common, scratch)
    if name == FEDAVG:
        return _fedavg(common, judged_by, comparison, scratch)
    return run_scheme(SCHEMES[name], common, scratch, on_step)


def _central(common: Common, scratch: Path) -> dict[str, Any]:
    """Everybody's texts in one place, adapters on all layers."""
    began = time.monotonic()
    result = tune(common.job(scratch / "out", None))
    text = sum(file.stat().st_size for file in common.client_files)
    return {
        "scheme": CENTRAL,
        "client": None,
        "targets": None,
        "negatives": None,
        "encoding": None,
        "bytes_up": text,
        "bytes_down": 0,
        "bytes_by_kind": {"text": text},
        "client_active_s": None,
        "client_peak_rss_mib": None,
        "server_s": time.monotonic() - began,
        "server_peak_rss_mib": max(device.peak_rss_mib for device in result.devices),
    }


def _fedavg(common: Common, judged_by: Sequence[Row], comparison: Comparison, scratch: Path) -> dict[str, Any]:
    """The outside reference: adapters averaged by Flower, an epoch a round."""
    from potluck.bench.fedavg import run_fedavg

    found = run_fedavg(
        common.model_dir,
        common.client_files,
        judged_by,
        output=scratch / "out",
        epochs=comparison.epochs,
        batch_size=max(1, common.batch_size // comparison.clients),
        learning_rate=common.learning_rate,
        max_length=common.max_length,
        seed=common.seed,
    )
    wire_s = 0.0 if common.link_mbit is None else 8e-6 / common.link_mbit
    each = [
        (found["bytes_up"] + found["bytes_down"]) / comparison.clients * wire_s + s for s in found["client_active_s"]
    ]
    return {
        "scheme": FEDAVG,
        "client": "trainable",
        "targets": None,
        "negatives": None,
        "encoding": "fp32",
        "bytes_up": found["bytes_up"],
        "bytes_down": found["bytes_down"],
        "bytes_by_kind": {"adapter": found["bytes_up"] + found["bytes_down"]},
        "client_active_s": sum(each) / len(each),
        "client_compute_s": sum(found["client_compute_s"]) / len(each),
        "client_peak_rss_mib": max(found["client_peak_rss_mib"]),
        "server_s": found["server_s"],
        "total_s": found["wall_s"],
    }


def _judged(model_dir: Path, adapter: Path | None, held_out: Sequence[Example]) -> dict[str, Any]:
    scores = score(model_dir, adapter, held_out, inference_dtype(model_dir))
    return {"eval_loss": scores.loss, "eval_accuracy": scores.accuracy}


def _check(comparison: Comparison) -> None:
    known = [CENTRAL, FEDAVG, *SCHEMES]
    for name in comparison.schemes:
        if name not in known:
            raise BadInput(f"There is no scheme '{name}' to compare; there are {', '.join(known)}.")
    if not comparison.schemes:
        raise BadInput("Name at least one scheme to compare.")
    if comparison.clients < 1 or comparison.epochs < 1:
        raise BadInput("A comparison needs at least one client and one epoch.")
