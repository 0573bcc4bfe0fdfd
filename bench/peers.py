"""``tensor-uniform`` against transformers' tensor parallelism, and ``pipeline`` against torch's, step by step in turn.

python -m bench.peers [--steps 6] [--layers 2] [--rows 8] [--length 128]

Two ranks of each kind, one thread and one core each, not slowed, messages over loopback. All train the same weights on
the same batches. The tensor-parallel ones train blocks and norms in full, since adapters of PEFT do not go together
with transformers' tensor parallelism; the pipelines train LoRA, in micro-batches of one row.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.peer_rank import KINDS, WORLD_SIZE
from potluck.bench.pool_sets import shape_of

PAIRS = (
    ("tensor-uniform", "transformers tp_plan=auto"),
    ("tensor-uniform-sync", "transformers tp_plan=auto"),
    ("pipeline", "torch 1f1b"),
)
WARM_UP = 2


def main() -> None:
    """Run all kinds, and print each one's median step and the ratios of pairs."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("steps", 6), ("layers", 2), ("rows", 8), ("length", 128)):
        arguments.add_argument(f"--{name}", type=int, default=default)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model_dir = _model(Path(directory) / "model", args.layers)
        worlds = {
            kind: stack.enter_context(_world(kind, model_dir, Path(directory), args.rows, args.length))
            for kind in KINDS
        }
        steps: dict[str, list[float]] = {kind: [] for kind in worlds}
        losses: dict[str, list[float]] = {kind: [] for kind in worlds}
        for step in range(args.steps + WARM_UP):
            for kind, ranks in worlds.items():
                told = _step(ranks, step)
                steps[kind].append(max(each["step_s"] for each in told))
                losses[kind].append(sum(each["loss"] for each in told))
                print(kind, round(steps[kind][-1], 3), round(losses[kind][-1], 5), flush=True)
    kept = {kind: seconds[WARM_UP:] for kind, seconds in steps.items()}
    ratios = {
        f"{ours} / {theirs}": [a / b for a, b in zip(kept[ours], kept[theirs], strict=True)] for ours, theirs in PAIRS
    }
    result = {
        **vars(args),
        "step_s": {kind: round(median(seconds), 3) for kind, seconds in kept.items()},
        "losses": losses,
        "ratios": {pair: [round(f(each), 3) for f in (median, min, max)] for pair, each in ratios.items()},
    }
    print(json.dumps(result))


def _model(directory: Path, layers: int) -> Path:
    """Some blocks of a Llama of 1B parameters, with random weights."""
    torch.manual_seed(0)
    config = shape_of("llama-1b", layers).config(layers)
    config.tie_word_embeddings = False  # transformers' plan cuts the head, and not the embedding
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)  # type: ignore[no-untyped-call]
    return directory


@contextmanager
def _world(
    kind: str, model_dir: Path, directory: Path, rows: int, length: int
) -> Iterator[list["subprocess.Popen[str]"]]:
    store = directory / kind.replace(" ", "-")
    command = [sys.executable, "-m", "bench.peer_rank", kind, str(model_dir), str(store), str(rows), str(length)]
    ranks = [
        subprocess.Popen([*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(WORLD_SIZE)
    ]
    try:
        for rank in ranks:
            _told(rank)  # that it is ready
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _step(ranks: Sequence["subprocess.Popen[str]"], step: int) -> list[dict[str, Any]]:
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(f"{step}\n")
        rank.stdin.flush()
    return [_told(rank) for rank in ranks]


def _told(rank: "subprocess.Popen[str]") -> dict[str, Any]:
    assert rank.stdout is not None
    for line in rank.stdout:
        if line.startswith("{"):
            told: dict[str, Any] = json.loads(line)
            return told
    raise SystemExit("A rank ended: see its message above.")


if __name__ == "__main__":
    main()
