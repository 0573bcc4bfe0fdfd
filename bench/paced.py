"""What planned shares gain over even ones on uneven devices, and how good the prediction is; emulated devices, root.

python -m bench.paced [--speeds 1.42:1:1] [--shape smollm2 | llama-2048] [--dtype fp32 | bf16] [--steps 8] [--load 0.6]

Every device measures itself twice. From the first profiles ``tensor`` is planned, from the second, independent ones
the integer optimum. Both, and even shares, are then trained in turn, step by step, on the same batches of 4 x 128
tokens, so that drift of the machine hits all alike.

    recovered = (even - planned) / (even - optimum)
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.jobs import LORA, median, smollm2, text_batches
from bench.paced_device import config_of
from potluck import testbed
from potluck.bench.pool_plans import TENSOR, Entry, tensor_of_all
from potluck.job import Data, Job
from potluck.models.families import decoder_of
from potluck.pool.candidates import Candidate, best, plans
from potluck.pool.profile import Profile, Work, parse_profile
from potluck.testbed.options import parse_rate, parse_speeds

PREFIX = "bench"
WARM_UP = 1


def main() -> None:
    """Testbed up, calibrate, measure twice, plan, train in turn, testbed down."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--speeds", default="1.42:1:1")
    arguments.add_argument("--shape", choices=("smollm2", "llama-2048"), default="smollm2")
    arguments.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    arguments.add_argument("--half-batches", type=int, choices=(1, 2), default=2)
    arguments.add_argument("--wire", choices=("fp32", "bf16"), default="fp32")
    arguments.add_argument("--steps", type=int, default=8)
    arguments.add_argument("--link", default="1gbit")
    arguments.add_argument("--load", type=float, default=0.9, help="part of the cores that the devices compute with")
    args = arguments.parse_args()
    testbed.down(PREFIX)
    bed = testbed.up(parse_speeds(args.speeds), parse_rate(args.link), load=args.load, prefix=PREFIX)
    try:
        for each in testbed.calibrate(bed, tolerance=None):
            print(f"{each.name}: speed {each.speed:.3f}, achieved {each.achieved:.3f} ({each.error:+.1%})", flush=True)
        with tempfile.TemporaryDirectory(prefix="potluck-bench-") as scratch:
            run(bed, args, Path(scratch))
    finally:
        testbed.down(PREFIX)


def run(bed: testbed.Testbed, args: argparse.Namespace, scratch: Path) -> None:
    """Measure, plan and train on a testbed that is up."""
    model_dir = smollm2()
    config = config_of(args.shape, model_dir)
    job = Job(
        model=str(model_dir),
        data=Data(train=["-"]),
        output=scratch / "out",
        lora=LORA,
        dtype=args.dtype,
        batch_size=4,
        half_batches=args.half_batches,
        wire=args.wire,
    )
    (batch,) = text_batches(model_dir, 4, 128, 1)
    targets = sum(len(positions) for positions in batch.layout.positions)
    work = Work(
        config=json.loads(config.to_json_string(use_diff=False)),
        rows=4 // args.half_batches,
        length=128,
        supervised=targets // args.half_batches,
        dtype=args.dtype,
        train="lora",
        lora=LORA,
        checkpointing=False,
    )
    common = {"shape": args.shape, "model_dir": str(model_dir), "job": job.model_dump(mode="json"), "steps": args.steps}
    measured = on_all(bed, scratch, "measure", {**common, "work": work.model_dump(mode="json")})
    first, second = ([parse_profile(each[i], where="bench") for each in measured] for i in range(2))
    seconds = [round(each[2], 1) for each in measured]
    decoder = decoder_of(config)
    even = best(plans(job, decoder, work, first), "tensor-uniform")
    planned, optimum = (tensor_of_all(job, decoder, work, profiles, TENSOR) for profiles in (first, second))
    print(f"auto would choose: {best(plans(job, decoder, work, first)).reason}", flush=True)
    chosen: dict[str, Candidate | Entry] = {"even": even, "planned": planned, "optimum": optimum}
    contents = {name: each.plan.to_json() for name, each in chosen.items() if each.plan is not None}
    trained = on_all(bed, scratch, "train", {**common, "plans": contents})[0]
    report(args, chosen, trained, seconds, first)


def on_all(bed: testbed.Testbed, scratch: Path, task: str, fields: dict[str, Any]) -> list[Any]:
    """Have every device do a task; what each wrote."""
    processes = []
    for device in bed.devices:
        spec = {
            **fields,
            "task": task,
            "name": device.name,
            "rank": device.rank,
            "world_size": len(bed.devices),
            "speed": device.speed,
            "address": device.address,
            "store": str(scratch / f"{task}.store"),
            "result": str(scratch / f"{task}.{device.rank}.json"),
            "cache": str(scratch / f"cache.{device.rank}"),
        }
        file = scratch / f"{task}.{device.rank}.spec.json"
        file.write_text(json.dumps(spec))
        argv = [sys.executable, "-m", "bench.paced_device", str(file)]
        processes.append(subprocess.Popen(device.command(argv)))
    try:
        if any(process.wait() for process in processes):
            raise SystemExit(f"a device failed during '{task}'")
    finally:
        for process in processes:
            process.kill()
    return [json.loads((scratch / f"{task}.{device.rank}.json").read_text()) for device in bed.devices]


def report(
    args: argparse.Namespace,
    chosen: Mapping[str, Candidate | Entry],
    trained: Any,
    seconds: list[float],
    profiles: list[Profile],
) -> None:
    """Print what was predicted and what was measured."""
    steps = {name: trained[name][WARM_UP:] for name in chosen}
    step_s = {name: median([step["step_s"] for step in steps[name]]) for name in chosen}
    rows = []
    for name, each in chosen.items():
        assert each.plan is not None
        assert each.prediction is not None
        waits = [sum(d["wait_s"] for d in s["devices"]) / (len(profiles) * s["step_s"]) for s in steps[name]]
        transfers = [s["devices"][0]["transfer_s"] / s["step_s"] for s in steps[name]]
        rows.append(
            {
                "plan": name,
                "heads": [len(d.heads) for d in each.plan.devices],
                "columns": [len(d.columns) for d in each.plan.devices],
                "vocab_rows": [len(d.vocab_rows) for d in each.plan.devices],
                "step_s": round(step_s[name], 3),
                "step_s_min": round(min(s["step_s"] for s in steps[name]), 3),
                "step_s_max": round(max(s["step_s"] for s in steps[name]), 3),
                "predicted_s": round(each.prediction.step_s, 3),
                "error": round(each.prediction.step_s / step_s[name] - 1, 3),
                "idle": round(median(waits), 3),
                "predicted_idle": round(each.prediction.idle_ratio, 3),
                "transfer": round(median(transfers), 3),
            }
        )
        print(rows[-1], flush=True)
    ratios = [
        (even["step_s"] - planned["step_s"]) / (even["step_s"] - optimum["step_s"])
        for even, planned, optimum in zip(*(steps[name] for name in ("even", "planned", "optimum")), strict=True)
        if even["step_s"] > optimum["step_s"]
    ]
    predicted_optimum = chosen["optimum"].prediction
    assert predicted_optimum is not None
    gap = step_s["even"] - step_s["optimum"]
    print(
        json.dumps(
            {
                **vars(args),
                "profile_s": seconds,
                "link": profiles[0].link.model_dump() if profiles[0].link else None,
                "recovered": round((step_s["even"] - step_s["planned"]) / gap, 3) if gap > 0 else None,
                "recovered_by_step": [round(ratio, 2) for ratio in ratios],
                "recovered_of_computed_optimum": round(
                    (step_s["even"] - step_s["planned"]) / (step_s["even"] - predicted_optimum.step_s), 3
                ),
                "plans": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
