"""Seconds of training until mails are told apart as well as asked, by strategy, on emulated devices.

sudo python -m bench.target [--set A] [--target 0.95] [--seeds 3] [--every 10] [--most 200] [--strategies tensor,...]

For each seed, all-MiniLM-L6-v2 is first trained in one process, ``--every`` steps more each time, until its accuracy
on 1,000 held-out mails reaches the target: at a constant rate, fewer steps are the first of more steps. Then the
devices train so many steps together with each strategy, as ``potluck tune`` and ``potluck join`` in namespaces of their
own, paced and on links of 1 Gbit/s. Every strategy computes the same; what differs is how long the steps take, so their
times are added up. What measuring the devices takes is told apart. An idle machine and root are needed.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import potluck
from bench.classes import job_fields, write
from potluck import testbed
from potluck.bench.mails import divided_mails
from potluck.bench.pool_sets import SETS
from potluck.job import METRICS_FILE, Job, dump_job, parse_job
from potluck.testbed.state import Testbed, TestDevice

STRATEGIES = ("tensor", "tensor-uniform", "pipeline", "data")
PREFIX = "target"
LOAD = 0.75  # of the cores: messages need the rest


def main() -> None:
    """Train to the target with every seed and strategy; print a line each, and all as one JSON object."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--set", choices=sorted(SETS), default="A")
    arguments.add_argument("--target", type=float, default=0.95)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--every", type=int, default=10)
    arguments.add_argument("--most", type=int, default=200)
    arguments.add_argument("--strategies", default=",".join(STRATEGIES))
    args = arguments.parse_args()
    train, held_out = divided_mails(1000)
    strategies = args.strategies.split(",")
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch, _devices(args.set) as bed:
        directory = Path(scratch)
        write(directory / "train.jsonl", train, "minilm")
        write(directory / "held-out.jsonl", held_out, "minilm")
        for seed in range(args.seeds):
            common = {
                **job_fields("minilm", 1, directory),
                "schedule": "constant",
                "warmup": 0.0,
                "half_batches": 2,
                "wire": "bf16",
                "data_stays": False,
                "threads": 1,
                "seed": seed,
                "overwrite": True,
            }
            steps = steps_to(args.target, common, args.every, args.most, directory)
            first = seed % len(strategies)
            for strategy in (*strategies[first:], *strategies[:first]):
                output = directory / f"{strategy}-{seed}"
                job = parse_job({**common, "strategy": strategy, "steps": steps, "output": output})
                result = tune_together(bed, job, directory / "job.yaml")
                times = step_times(output)
                results.append(
                    {
                        "strategy": strategy,
                        "seed": seed,
                        "steps": steps,
                        "trained_s": round(sum(times), 2),
                        "step_s": round(median(times), 4),
                        "accuracy": result["eval_after"]["accuracy"],
                        "devices": [device["name"] for device in result["devices"]],
                        "idle_ratio": round(result["idle_ratio"], 3),
                        "predicted_step_s": result["predicted_step_s"],
                    }
                )
                print(json.dumps(results[-1]), flush=True)
    seconds = {name: [r["trained_s"] for r in results if r["strategy"] == name] for name in strategies}
    ratios = {
        f"{strategies[0]}/{other}": [
            round(a / b, 3) for a, b in zip(seconds[strategies[0]], seconds[other], strict=True)
        ]
        for other in strategies[1:]
    }
    print(json.dumps({**vars(args), "seconds": seconds, "ratios": ratios, "results": results}))


def steps_to(target: float, common: dict[str, Any], every: int, most: int, directory: Path) -> int:
    """How many steps reach the target: a multiple of ``every``."""
    for steps in range(every, most + 1, every):
        job = {**common, "strategy": "single", "threads": 0, "steps": steps, "output": directory / "alone"}
        after = potluck.tune(parse_job(job)).eval_after
        assert after is not None
        assert after.accuracy is not None
        print(json.dumps({"seed": common["seed"], "steps": steps, "accuracy": after.accuracy}), flush=True)
        if after.accuracy >= target:
            return steps
    raise SystemExit(f"{most} steps do not reach an accuracy of {target}.")


@contextmanager
def _devices(name: str) -> Iterator[Testbed]:
    bed = testbed.up(SETS[name], 10**9, load=LOAD, prefix=PREFIX)
    try:
        for each in testbed.calibrate(bed, seconds=5.0, tolerance=None):
            print(
                json.dumps({"device": each.name, "speed": each.speed, "achieved": round(each.achieved, 3)}), flush=True
            )
        yield bed
    finally:
        testbed.down(PREFIX)


def tune_together(bed: Testbed, job: Job, file: Path) -> dict[str, Any]:
    """Run the job on all devices of the testbed; what ``potluck tune --json`` says of it."""
    file.write_text(dump_job(job), encoding="utf-8")
    hub, *others = bed.devices
    peers = ("--peers", str(len(others)), "--address", hub.address)
    running = [_started(hub, "tune", str(file), "--overwrite", "--json", *peers)]
    said: list[str] = []
    try:
        out = running[0].stdout
        assert out is not None
        for line in out:
            said.append(line)
            if found := re.search(r"potluck join (\S+)", line):
                running += [_started(other, "join", found[1], "--name", other.name) for other in others]
        if running[0].wait() != 0:
            raise SystemExit("".join(said))
    finally:
        for process in running:
            process.kill()
            process.communicate()
    result: dict[str, Any] = json.loads(said[-1])
    return result


def _started(device: TestDevice, *arguments: str) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-m", "potluck", *arguments, "--pace", f"{device.speed:g}"]
    return subprocess.Popen(
        device.command(argv), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def step_times(output: Path) -> list[float]:
    """Seconds of each step of a result."""
    lines = map(json.loads, (output / METRICS_FILE).read_text(encoding="utf-8").splitlines())
    return [line["step_s"] for line in lines if line["event"] == "step"]


if __name__ == "__main__":
    main()
