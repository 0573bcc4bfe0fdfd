"""What the tensor walk costs: world size 1 with all its messages against ``single``, process CPU seconds.

python -m bench.overhead [--steps 20] [--dtype fp32 bf16] [--half-batches 1 2]
"""

import argparse
import json
from functools import partial

import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from bench.jobs import demo_batches, median, part_of, smollm2, step_of, stepper_of, text_batches
from bench.single import WARM_UP, timed
from potluck.chain.comm import Comm, gloo_group
from potluck.models.precision import torch_dtype


def main() -> None:
    """Steps of the same batches in turn, one thread each; Gloo's own threads are counted."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--dtype", choices=("fp32", "bf16"), nargs="*", default=["fp32", "bf16"])
    arguments.add_argument("--half-batches", type=int, choices=(1, 2), nargs="*", default=[1, 2])
    args = arguments.parse_args()
    torch.set_num_threads(1)
    model_dir = smollm2()
    count = args.steps + WARM_UP
    data = {"text 4x128": text_batches(model_dir, 4, 128, count), "demo 16 rows": demo_batches(model_dir, 16, count)}
    results = []
    for dtype in args.dtype:
        compute = torch_dtype(dtype)
        for half_batches in args.half_batches:
            for name, batches in data.items():
                single = stepper_of(part_of(model_dir, "1", 0, compute), Comm(), half_batches=half_batches)
                group = gloo_group(HashStore(), 0, 1, "127.0.0.1", timeout_s=60)
                comm = Comm(group, wire=torch.float32)
                tensor = stepper_of(part_of(model_dir, "1", 0, compute), comm, half_batches=half_batches)
                ratios, seconds = [], []
                for i, batch in enumerate(batches):
                    pair = [single, tensor] if i % 2 else [tensor, single]
                    cpu_s = {id(stepper): timed(partial(step_of, stepper), batch)[1] for stepper in pair}
                    ratios.append(cpu_s[id(tensor)] / cpu_s[id(single)])
                    seconds.append(cpu_s[id(single)])
                results.append(
                    {
                        "data": name,
                        "dtype": dtype,
                        "half_batches": half_batches,
                        "single_cpu_s": round(median(seconds[WARM_UP:]), 3),
                        "ratio": round(median(ratios[WARM_UP:]), 4),
                        "ratio_min": round(min(ratios[WARM_UP:]), 4),
                        "ratio_max": round(max(ratios[WARM_UP:]), 4),
                    }
                )
                print(results[-1], flush=True)
    print(json.dumps({"steps": args.steps, "results": results}))


if __name__ == "__main__":
    main()
