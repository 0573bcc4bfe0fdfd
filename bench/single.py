"""``single`` against the plain transformers + peft loop: tokens per second, step by step in turn.

python -m bench.single [--steps 20] [--threads 1]
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial

import torch

from bench.jobs import demo_batches, median, part_of, smollm2, step_of, stepper_of, text_batches, tokens
from bench.plain import PlainLoop
from potluck.chain.comm import Comm
from potluck.texts.batch import Batch

WARM_UP = 3


def main() -> None:
    """Compare on text (every token a target) and on the demo's data (few are), in float32 and bfloat16."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--threads", type=int, default=1)
    args = arguments.parse_args()
    torch.set_num_threads(args.threads)
    model_dir = smollm2()
    count = args.steps + WARM_UP
    data = {"text 4x128": text_batches(model_dir, 4, 128, count), "demo 16 rows": demo_batches(model_dir, 16, count)}
    results = []
    for dtype, compute in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        for name, batches in data.items():
            stepper = stepper_of(part_of(model_dir, "1", 0, compute), Comm())
            plain = PlainLoop(model_dir, autocast=dtype == "bf16")
            ours, theirs, cpu = [], [], []
            for batch in batches:
                our_s, our_cpu_s = timed(partial(step_of, stepper), batch)
                their_s, their_cpu_s = timed(plain.step, batch)
                ours.append(tokens(batch) / our_s)
                theirs.append(tokens(batch) / their_s)
                cpu.append(their_cpu_s / our_cpu_s)
            ratios = [a / b for a, b in zip(ours, theirs, strict=True)][WARM_UP:]
            results.append(
                {
                    "data": name,
                    "dtype": dtype,
                    "tokens_per_s": round(median(ours[WARM_UP:]), 1),
                    "plain_tokens_per_s": round(median(theirs[WARM_UP:]), 1),
                    "ratio": round(median(ratios), 3),
                    "ratio_cpu": round(median(cpu[WARM_UP:]), 3),
                    "ratio_min": round(min(ratios), 3),
                    "ratio_max": round(max(ratios), 3),
                }
            )
            print(results[-1], flush=True)
    print(json.dumps({"steps": args.steps, "threads": args.threads, "results": results}))


def timed(step: Callable[[Batch], object], batch: Batch) -> tuple[float, float]:
    """Wall and process CPU seconds of one step."""
    wall, cpu = time.perf_counter(), time.process_time()
    step(batch)
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
