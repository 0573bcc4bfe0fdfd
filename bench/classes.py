"""Spam or not, by every strategy: the same accuracy whoever trains.

python -m bench.classes [--model minilm|smollm2] [--seeds 3] [--steps 100] [--held-out 1000]

``minilm``: all-MiniLM-L6-v2 with a head of two classes (task: sequence-classification). ``smollm2``:
SmolLM2-135M-Instruct answers "spam" or "ham" (task: causal-lm; exact match of its greedy answer). LoRA on all linears,
batches of 16 mails, float32. Local devices; the strategies of one seed see the same batches.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import potluck
from bench.jobs import smollm2
from potluck.bench.mails import HAM, SPAM, Mail, divided_mails
from potluck.bench.minilm import minilm
from potluck.job import parse_job

STRATEGIES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "single"},
    "tensor 3:2": {"strategy": "tensor", "devices": "3:2"},
    "data": {"strategy": "data", "devices": "2", "data_stays": False},
    "pipeline": {"strategy": "pipeline", "devices": "2", "data_stays": False},
}


def main() -> None:
    """Train and score every strategy with every seed; print a line each, and all as one JSON object."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", choices=("minilm", "smollm2"), default="minilm")
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=100)
    arguments.add_argument("--held-out", type=int, default=1000)
    args = arguments.parse_args()
    train, held_out = divided_mails(args.held_out)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        common = job_fields(args.model, args.steps, directory)
        write(directory / "train.jsonl", train, args.model)
        write(directory / "held-out.jsonl", held_out, args.model)
        for seed in range(args.seeds):
            for name, fields in STRATEGIES.items():
                start = time.perf_counter()
                job = parse_job(
                    {**common, **fields, "seed": seed, "output": directory / f"{name}-{seed}".replace(" ", "-")}
                )
                result = potluck.tune(job)
                after = result.eval_after
                assert after is not None
                results.append(
                    {
                        "strategy": name,
                        "seed": seed,
                        "accuracy": after.accuracy,
                        "f1": after.f1,
                        "matthews": after.matthews,
                        "loss_last": result.loss_last,
                        "step_s": round(result.step_s, 3),
                        "took_s": round(time.perf_counter() - start, 1),
                    }
                )
                print(json.dumps(results[-1]), flush=True)
    means = {name: mean(r["accuracy"] for r in results if r["strategy"] == name) for name in STRATEGIES}
    print(json.dumps({**vars(args), "mean_accuracy": means, "results": results}))


def job_fields(model: str, steps: int, directory: Path) -> dict[str, Any]:
    """What the jobs of all strategies and seeds have in common."""
    data: dict[str, Any] = {"train": str(directory / "train.jsonl"), "eval": str(directory / "held-out.jsonl")}
    fields: dict[str, Any] = {
        "steps": steps,
        "batch_size": 16,
        "learning_rate": 1e-3,
        "dtype": "fp32",
        "half_batches": 1,  # between processes of one machine there is no time on a wire to hide
    }
    if model == "minilm":
        of_classes = {"max_length": 128, "labels": [HAM, SPAM]}
        return {**fields, "model": str(minilm()), "task": "sequence-classification", "data": {**data, **of_classes}}
    return {**fields, "model": str(smollm2()), "data": {**data, "format": "prompt", "max_length": 256}}


def write(file: Path, mails: Sequence[Mail], model: str) -> None:
    """The mails as lines that the model's task reads."""
    rows = (mail.labelled() if model == "minilm" else mail.asked() for mail in mails)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main()
