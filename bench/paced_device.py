"""One emulated device of :mod:`bench.paced`: a process in its namespaces, told what to do by a JSON file."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transformers import PretrainedConfig

from bench.jobs import LORA, llama_of_hidden_size_2048, text_batches
from potluck.chain.comm import Comm, gloo_group
from potluck.chain.pace import Pace, come_first
from potluck.job import Job
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.precision import torch_dtype
from potluck.models.random_weights import RandomWeights
from potluck.models.weights import Weights
from potluck.pool.link import measure_link
from potluck.pool.measure import measure
from potluck.pool.measured_work import message_bytes
from potluck.pool.plan import Plan
from potluck.pool.profile import Work
from potluck.pool.step import OWNER, Settings, Stepper
from potluck.pool.turns import Turn


def config_of(shape: str, model_dir: Path) -> PretrainedConfig:
    """SmolLM2's, or that of six blocks of hidden size 2048."""
    return read_config(model_dir) if shape == "smollm2" else llama_of_hidden_size_2048(6)


def main(spec: dict[str, Any]) -> None:
    """Measure, or train by several plans in turn."""
    torch.set_num_threads(1)
    store = FileStore(spec["store"], spec["world_size"])
    group = gloo_group(store, spec["rank"], spec["world_size"], spec["address"], timeout_s=600)
    come_first()
    pace = Pace(spec["speed"])
    job = Job.model_validate(spec["job"])
    comm = Comm(group, wire=torch_dtype(job.wire), pace=pace)
    result = _measured(spec, comm, pace) if spec["task"] == "measure" else _trained(spec, job, comm, pace)
    Path(spec["result"]).write_text(json.dumps(result))


def _measured(spec: dict[str, Any], comm: Comm, pace: Pace) -> list[Any]:
    """Two profiles, each of its own measurements, and the seconds the first took."""
    work = Work.model_validate(spec["work"])
    size = message_bytes(work, spec["job"]["wire"])
    found: list[Any] = []
    seconds = 0.0
    for i in range(2):
        comm.all_reduce(torch.zeros(1)).wait()
        start = time.perf_counter()
        profile = measure(work, device=spec["name"], threads=1, pace=pace, cache=Path(f"{spec['cache']}.{i}"))
        profile = profile.model_copy(update={"link": measure_link(comm, size)})
        seconds = seconds or time.perf_counter() - start
        found.append(profile.model_dump(mode="json"))
    return [*found, seconds]


def _trained(spec: dict[str, Any], job: Job, comm: Comm, pace: Pace) -> dict[str, list[Any]]:
    """Steps of each plan in turn, as rank 0 has them."""
    model_dir = Path(spec["model_dir"])
    config = config_of(spec["shape"], model_dir)
    decoder = decoder_of(config)
    weights: Weights = Checkpoint.open(model_dir) if spec["shape"] == "smollm2" else RandomWeights(decoder)
    steppers = {}
    for name, content in spec["plans"].items():
        shares = Plan.from_json(content).shares
        part = build_part(weights, decoder, shares, comm.rank, compute=torch_dtype(job.dtype), lora=LORA, seed=0)
        settings = Settings(1000, 1e-4, schedule="constant", clip=1.0, half_batches=job.half_batches)
        own = Comm(comm.group, wire=comm.wire, pace=pace)
        steppers[name] = Stepper(part, own, settings)
    steps: dict[str, list[Any]] = {name: [] for name in steppers}
    for i, batch in enumerate(text_batches(model_dir, 4, 128, spec["steps"] + 1)):
        names = [*steppers]
        for name in names[i % len(names) :] + names[: i % len(names)]:
            stepper = steppers[name]
            comm.all_reduce(torch.zeros(1)).wait()  # all begin together
            step = stepper.step([Turn(OWNER, [batch] if comm.rank == OWNER else None)])
            times = [{"compute_s": d.compute_s, "wait_s": d.wait_s, "transfer_s": d.transfer_s} for d in step.devices]
            steps[name].append({"step_s": step.step_s, "devices": times})
    return steps


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
