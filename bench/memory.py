"""Peak memory of each device against what it must hold: imports + its weights + activations + at most 100 MiB.

python -m bench.memory [--shape smollm2 | llama-1.4b] [--dtype fp32 | bf16] [--steps 4]

SmolLM2 is cut 3:2:1. The 1.4B shape (24 blocks, hidden 2048, 16 heads, MLP 5632, random bfloat16 weights written shard
by shard) is cut over four devices. Every batch is 4 x 128 tokens of text, all targets. Activations are counted, not
estimated: the bytes that a device's graphs keep between its forward and its backward walk.
"""

import argparse
import json
import pydoc_data.topics
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.jobs import llama_of_hidden_size_2048, part_of, smollm2, stepper_of, text_batches
from potluck.chain.comm import Comm
from potluck.job import Job
from potluck.job_sections import Data
from potluck.models.families import read_config
from potluck.models.families.fields import fields_of
from potluck.models.precision import torch_dtype
from potluck.models.save import CheckpointWriter
from potluck.pool.launch import run_devices
from potluck.pool.plan import make_plan
from potluck.pool.step import OWNER
from potluck.pool.turns import Turn

ALLOWED_MIB = 100.0


def main() -> None:
    """Measure devices as real processes, then count activations on each one's part, alone."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--shape", choices=("smollm2", "llama-1.4b"), default="smollm2")
    arguments.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    arguments.add_argument("--steps", type=int, default=4)
    args = arguments.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model_dir, devices = smollm2(), "3:2:1"
        if args.shape == "llama-1.4b":
            model_dir, devices = write_llama(Path(scratch) / "model", model_dir), "1:1:1:1"
        measured = measure(Path(scratch), model_dir, devices, args.dtype, args.steps)
        rows = []
        for rank, device in enumerate(measured):
            kept_mib, state_mib = activations_mib(model_dir, devices, rank, args.dtype)
            must_mib = device["import_rss_mib"] + device["weights_mib"] + kept_mib + state_mib
            row = {
                "device": rank,
                "peak_rss_mib": device["peak_rss_mib"],
                "import_rss_mib": device["import_rss_mib"],
                "weights_mib": device["weights_mib"],
                "activations_mib": kept_mib,
                "gradients_and_optimizer_mib": state_mib,
                "beyond_mib": device["peak_rss_mib"] - must_mib,
                "within": device["peak_rss_mib"] - must_mib <= ALLOWED_MIB,
            }
            rows.append({key: round(value, 1) if isinstance(value, float) else value for key, value in row.items()})
            print(rows[-1], flush=True)
    print(json.dumps({"shape": args.shape, "dtype": args.dtype, "devices": rows}))


def measure(scratch: Path, model_dir: Path, devices: str, dtype: str, steps: int) -> list[dict[str, Any]]:
    """Train as ``potluck tune`` does; what each device said of its memory."""
    data = scratch / "text.txt"
    write_text(data)
    job = Job(
        model=str(model_dir),
        data=Data(train=[str(data)], format="text", max_length=128),
        output=scratch / "out",
        devices=devices,
        dtype=dtype,  # type: ignore[arg-type]
        batch_size=4,
        steps=steps,
        half_batches=2,
    )
    config = read_config(model_dir)
    plan = make_plan(job, config)
    (scratch / "out").mkdir()
    said: list[dict[str, Any]] = [{} for _ in plan.devices]

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] in ("loaded", "finished"):
            said[event["rank"]] |= event

    common = {
        "names": [share.name for share in plan.devices],
        "world_size": len(plan.devices),
        "job": job.model_dump(mode="json"),
        "model_dir": str(model_dir),
        "store": str(scratch / "store"),
        "threads": 1,
        "plan": plan.to_json(),
        "config": fields_of(config),
        "result_dir": str(scratch / "out"),
    }
    run_devices(
        [
            {"rank": rank, "name": share.name, "owns": rank == OWNER, **common}
            for rank, share in enumerate(plan.devices)
        ],
        on_event,
    )
    return said


def activations_mib(model_dir: Path, devices: str, rank: int, dtype: str) -> tuple[float, float]:
    """Bytes kept for the backward walk by this rank's part, and its gradients with AdamW's two moments."""
    part = part_of(model_dir, devices, rank, torch_dtype(dtype))
    weights = {t.local.untyped_storage().data_ptr() for t in part.chain.trained}
    weights |= {tensor.untyped_storage().data_ptr() for tensor in frozen_tensors(part.chain)}
    kept: dict[int, int] = {}
    stepper = stepper_of(part, Comm(), half_batches=2)
    (batch,) = text_batches(model_dir, 4, 128, 1)

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        stepper.accumulate([Turn(OWNER, [batch])])
    gradients = sum(t.local.nbytes for t in part.chain.trained)
    return sum(kept.values()) / 2**20, 3 * gradients / 2**20


def frozen_tensors(holder: object) -> list[Tensor]:
    """All tensors reachable through dataclass fields and tuples."""
    if isinstance(holder, Tensor):
        return [holder]
    if isinstance(holder, tuple):
        return [tensor for item in holder for tensor in frozen_tensors(item)]
    fields = getattr(holder, "__dataclass_fields__", {})
    return [tensor for name in fields for tensor in frozen_tensors(getattr(holder, name))]


def write_text(path: Path) -> None:
    """The text the counted batch is from, as a file."""
    path.write_text("\n\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")


def write_llama(directory: Path, tokenizer_dir: Path) -> Path:
    """A Llama of 1.4B parameters with random bfloat16 weights, never held whole in memory."""
    directory.mkdir()
    config = llama_of_hidden_size_2048(24)
    config.save_pretrained(directory)
    for file in tokenizer_dir.iterdir():
        if file.name.startswith(("tokenizer", "special", "chat", "vocab", "merges")):
            shutil.copy(file, directory)
    D, F = config.hidden_size, config.intermediate_size
    writer = CheckpointWriter(directory, max_shard_bytes=256 << 20)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.02).bfloat16()

    writer.add("model.embed_tokens.weight", random(config.vocab_size, D))
    for i in range(config.num_hidden_layers):
        at = f"model.layers.{i}"
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            writer.add(f"{at}.self_attn.{name}.weight", random(D, D))
        for name, shape in (("gate_proj", (F, D)), ("up_proj", (F, D)), ("down_proj", (D, F))):
            writer.add(f"{at}.mlp.{name}.weight", random(*shape))
        for name in ("input_layernorm", "post_attention_layernorm"):
            writer.add(f"{at}.{name}.weight", torch.ones(D, dtype=torch.bfloat16))
    writer.add("model.norm.weight", torch.ones(D, dtype=torch.bfloat16))
    writer.finish()
    return directory


if __name__ == "__main__":
    main()
