"""A tiny model, two clients' commands for it, and a store of what they contributed; trained in a process of its own.

As a script, with a job's file and the steps between which it sleeps: trains, and says each step.
"""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from contributed import contribute

from potluck.job import Job, dump_job, load_job
from potluck.models.checkpoint import Checkpoint
from potluck.split.agreement import Manifest, Shard
from potluck.split.forward import records
from potluck.split.listener import SplitListener
from potluck.split.parts import client_part
from potluck.split.records import TargetTable, draw_negatives, write_records, write_rows
from potluck.split.settings import Settled, settle
from potluck.split.store import Store
from potluck.split.trainer import train_store
from potluck.texts.batch import Example
from potluck.texts.encode import encode
from potluck.texts.rows import read_rows
from potluck.texts.tokenizer import load_tokenizer
from word_model import save_word_model

THINGS = ["light", "music", "door", "lamp", "fan", "oven"]
DOINGS = ["on", "off", "open", "shut"]
WORDS = ["<eos>", *THINGS, *DOINGS, "please", "->", "A", "B", "C", "D", "E", "F", "G"]
COMMANDS = [
    {"prompt": f"{polite}{thing} {doing} ->", "completion": f" {WORDS[-7 + t]} {WORDS[-7 + d]}"}
    for polite in ("", "please ")
    for t, thing in enumerate(THINGS)
    for d, doing in enumerate(DOINGS)
]
HELD_OUT = 4
NEGATIVES = 14
"""Of each client; together they miss some of the tokens that nobody has as a target."""
OWN = {client: [*rows[:HELD_OUT], *rows] for client, rows in (("ann", COMMANDS[0::2]), ("bob", COMMANDS[1:30:2]))}
"""What is held out is learnt by heart too, so that a tiny model can get it right."""


def little_job(directory: Path, split: Mapping[str, Any] | None = None, **fields: Any) -> Job:
    """A job whose model is made if it is not there yet."""
    model = directory / "model"
    if not model.exists():
        save_word_model(model, WORDS, num_hidden_layers=3)
    content = {
        "model": str(model),
        "output": directory / "adapter",
        "dtype": "fp32",
        "threads": 1,
        "epochs": 3,
        "batch_size": 8,
        "learning_rate": 0.02,
        "lora": {"rank": 4},
        "split": {"cut": 1, "encoding": "fp32", **(split or {})},
    }
    return Job.model_validate(content | fields)


def examples_of(settled: Settled, rows: Sequence[Mapping[str, str]], directory: Path) -> list[Example]:
    path = directory / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = load_tokenizer(settled.model_dir)
    return encode(read_rows([str(path)], "auto"), tokenizer, settled.job.data).examples


def fill(job: Job, directory: Path, own: Mapping[str, Sequence[Mapping[str, str]]] = OWN) -> dict[str, list[Example]]:
    """Contribute each client's rows, the first few held out; those held out, by client."""
    settled = settle(job, SplitListener())
    split, held_out = settled.split, {}
    for seed, (client, rows) in enumerate(own.items()):
        examples = examples_of(settled, rows, directory)
        held_out[client] = examples[:HELD_OUT]
        spool = directory / f"spool-{client}"
        spool.mkdir(exist_ok=True)
        table = TargetTable() if split.targets == "embeddings" else None
        shards: list[Shard] = []
        with Checkpoint.open(settled.model_dir) as checkpoint:
            part = client_part(
                checkpoint, settled.decoder, split.cut, compute=torch.float32, adapter=None, seed=job.seed
            )
            for which, some in (("train", examples[HELD_OUT:]), ("held-out", examples[:HELD_OUT])):
                shards += write_records(
                    records(part, some), spool, part=which, encoding=split.encoding, table=table, shard_bytes=16_384
                )
            if table is not None:
                count = 0 if split.negatives == "table" else min(split.negatives, NEGATIVES)
                drawn = draw_negatives(settled.decoder.vocab_size, count, seed)
                for which, ids in (("table", table.ids), ("negatives", drawn)):
                    shards += write_rows(ids, part.target_rows, spool, part=which, encoding=split.encoding)
        manifest = Manifest(client=client, agreement=settled.agreement, data=f"{seed}" * 64, shards=tuple(shards))
        contribute(Store(settled.store_dir), spool, manifest, settled.limits, key=f"{seed:064x}")
    return held_out


class Telling(SplitListener):
    """Says each step, and gives time to be killed at it."""

    def __init__(self, pause_s: float) -> None:
        self.pause_s = pause_s

    def step(self, step: int, steps: int, loss: float, step_s: float) -> None:
        print(step, steps, loss, flush=True)
        time.sleep(self.pause_s)


def written(job: Job, path: Path) -> Path:
    path.write_text(dump_job(job))
    return path


if __name__ == "__main__":
    train_store(load_job(sys.argv[1]), listener=Telling(float(sys.argv[2])), checkpoint_every_s=0)
