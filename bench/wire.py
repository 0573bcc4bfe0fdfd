"""Messages in bfloat16 against float32: the loss of each step, and how held-out commands are answered afterwards.

python -m bench.wire [--steps 60] [--dtype fp32 | bf16]

The demo's job (SmolLM2, smart-home commands, three local devices 3:2:1, two half-batches), once with each wire, from
the same seed. ``dtype`` is what linears compute in. What the wire saves in time is measured by ``bench pool``.
"""

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean

from potluck import tune
from potluck.demo.intents import sample_commands
from potluck.demo.run import demo_job
from potluck.job import METRICS_FILE, Job

_SEED = 0
_LAST = 10


def main() -> None:
    """Train twice; print both curves' distance and the scores."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=60)
    arguments.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = arguments.parse_args()
    commands = sample_commands(_SEED)
    losses: dict[str, list[float]] = {}
    held_out: dict[str, dict[str, float | None]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for wire in ("fp32", "bf16"):
            job = demo_job(Path(directory) / wire, seed=_SEED, steps=args.steps, overwrite=False)
            for file, rows in ((job.data.train[0], commands.train), (job.data.eval[0], commands.held_out)):
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                Path(file).write_text("".join(json.dumps(each.row()) + "\n" for each in rows), encoding="utf-8")
            chosen = Job.model_validate(
                job.model_dump() | {"wire": wire, "dtype": args.dtype, "half_batches": 2, "micro_batch_size": None}
            )
            after = tune(chosen).eval_after
            assert after is not None
            losses[wire] = _losses(chosen.output)
            held_out[wire] = {"loss": after.loss, "accuracy": after.accuracy}
            print(wire, held_out[wire], flush=True)
    apart = [abs(a - b) for a, b in zip(losses["fp32"], losses["bf16"], strict=True)]
    last = {wire: mean(each[-_LAST:]) for wire, each in losses.items()}
    summary = {"apart_mean": mean(apart), "apart_most": max(apart), f"last_{_LAST}_steps": last}
    print(json.dumps({**vars(args), "losses": losses, "held_out": held_out, **summary}))


def _losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


if __name__ == "__main__":
    main()
