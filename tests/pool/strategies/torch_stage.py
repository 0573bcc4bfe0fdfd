"""One rank of torch's pipelining: RANK WORLD_SIZE DIRECTORY; leaves losses and gradients of its stage there."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from bench.torch_pipeline import TorchPipeline
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pool.plain import exact_norms
from pool.strategies.torch_batches import BLOCKS, batches


def main(rank: int, world_size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(directory / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120))
    assert dist.group.WORLD is not None
    for train in ("full", "lora"):
        initial = load_file(directory / f"{train}.initial.safetensors")
        for schedule in ("gpipe", "1f1b"):
            model = AutoModelForCausalLM.from_pretrained(directory / "model", dtype=torch.float64)
            if train == "lora":
                config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
                model = get_peft_model(model, config).get_base_model()
            trained = {}
            for name, parameter in model.named_parameters():
                plain = name.replace(".default", "")
                parameter.requires_grad_(plain in initial)
                if plain in initial:
                    parameter.detach().copy_(initial[plain])
                    trained[plain] = parameter
            pipeline = TorchPipeline(model, BLOCKS, dist.group.WORLD, len(batches()), schedule=schedule)  # type: ignore[arg-type]
            for _ in range(2):  # torch finds out shapes during the first
                for parameter in trained.values():
                    parameter.grad = None
                loss = pipeline.walk(batches())
            found = {name: p.grad for name, p in trained.items() if p.grad is not None}
            found["loss"] = torch.tensor(loss, dtype=torch.float64)
            save_file(found, directory / f"{train}.{schedule}.{rank}.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    with exact_norms():
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
