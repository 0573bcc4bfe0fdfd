"""One rank of :mod:`bench.peers`: KIND MODEL_DIR STORE ROWS LENGTH RANK. Takes a step for each line of its stdin."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]
from transformers import AutoModelForCausalLM
from transformers.distributed.configuration_utils import DistributedConfig

from bench.jobs import LORA
from bench.torch_pipeline import TorchPipeline
from potluck.bench.pool_rank import examples_of
from potluck.chain.comm import Comm, gloo_group
from potluck.job import Job
from potluck.job_sections import Data
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.precision import torch_dtype
from potluck.pool.plan import make_plan
from potluck.pool.step import OWNER, Stepper
from potluck.pool.strategies.build import part_for, strategy_for
from potluck.pool.trainer import settings_of
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch
from potluck.texts.collate import collate

WORLD_SIZE = 2
KINDS = ("tensor-uniform", "tensor-uniform-sync", "transformers tp_plan=auto", "pipeline", "torch 1f1b")
_RATE = 1e-4
_TIMEOUT_S = 600.0
_TABLES = ("embed_tokens", "lm_head")

Step = Callable[[list[Batch]], float]
"""Batches of a step, one row each, to this rank's part of the loss."""


def main(kind: str, model_dir: Path, store: str, rows: int, length: int, rank: int) -> None:
    """Say that it is ready, then a line a step."""
    os.sched_setaffinity(0, {rank})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    vocab_rows = read_config(model_dir).vocab_size
    step = _maker(kind)(model_dir, store, rows, rank)
    print(json.dumps({"ready": kind}), flush=True)
    for line in sys.stdin:
        batches = [collate([example]) for example in examples_of(int(line), rows, length, vocab_rows)]
        start = time.perf_counter()
        loss = step(batches)
        print(json.dumps({"step_s": time.perf_counter() - start, "loss": loss}), flush=True)


def _maker(kind: str) -> Callable[[Path, str, int, int], Step]:
    if kind == "transformers tp_plan=auto":
        return _transformers
    if kind == "torch 1f1b":
        return _torch_pipeline
    return {"tensor-uniform": _tensor_uniform, "tensor-uniform-sync": _synchronous, "pipeline": _pipeline}[kind]


def _tensor_uniform(model_dir: Path, store: str, rows: int, rank: int) -> Step:
    fields = {"strategy": "tensor-uniform", "train": "full", "half_batches": 2, "wire": "bf16"}
    return _potluck(model_dir, store, rows, rank, fields)


def _synchronous(model_dir: Path, store: str, rows: int, rank: int) -> Step:
    fields = {"strategy": "tensor-uniform", "train": "full", "half_batches": 1, "wire": "fp32"}
    return _potluck(model_dir, store, rows, rank, fields)


def _pipeline(model_dir: Path, store: str, rows: int, rank: int) -> Step:
    fields = {"strategy": "pipeline-uniform", "micro_batch_size": 1, "data_stays": False, "lora": LORA}
    return _potluck(model_dir, store, rows, rank, fields)


def _potluck(model_dir: Path, store: str, rows: int, rank: int, fields: dict[str, object]) -> Step:
    usual = {"model": str(model_dir), "data": Data(train=["-"]), "output": Path("-"), "devices": str(WORLD_SIZE)}
    steps = {"batch_size": rows, "learning_rate": _RATE, "schedule": "constant", "warmup": 0.0, "clip": 0.0}
    job = Job.model_validate({**usual, **steps, **fields, "dtype": "fp32"})
    config = read_config(model_dir)
    plan, lora = make_plan(job, config), job.lora if job.train == "lora" else None
    part = part_for(
        plan, rank, Checkpoint.open(model_dir), decoder_of(config), compute=torch.float32, adapter=lora, seed=0
    )
    group = gloo_group(FileStore(store, WORLD_SIZE), rank, WORLD_SIZE, "127.0.0.1", timeout_s=_TIMEOUT_S)
    comm, settings = Comm(group, wire=torch_dtype(job.wire)), settings_of(job, 1 << 20)
    stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))

    def step(batches: list[Batch]) -> float:
        own = batches if job.micro_batch_size == 1 else [_together(batches)]
        return stepper.step([Turn(OWNER, own if rank == OWNER else None)]).loss / WORLD_SIZE

    return step


def _transformers(model_dir: Path, store: str, rows: int, rank: int) -> Step:
    """Blocks and norms in full, by the plan transformers has for the family."""
    _default_group(store, rank)
    plan = DistributedConfig(tp_size=WORLD_SIZE, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, distributed_config=plan).train()
    trained = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(table in name for table in _TABLES))
        trained += [parameter] if parameter.requires_grad else []
    optimizer = torch.optim.AdamW(trained, lr=_RATE, weight_decay=0.0)

    def step(batches: list[Batch]) -> float:
        whole = _together(batches)
        loss: Tensor = model(input_ids=whole.ids_BS, labels=whole.ids_BS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach()) / WORLD_SIZE

    return step


def _torch_pipeline(model_dir: Path, store: str, rows: int, rank: int) -> Step:
    """LoRA on all linears of the blocks."""
    group = _default_group(store, rank)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = LoraConfig(r=LORA.rank, lora_alpha=int(LORA.alpha), target_modules="all-linear", task_type="CAUSAL_LM")
    adapted: nn.Module = get_peft_model(model, config).get_base_model()
    layers = model.config.num_hidden_layers
    blocks = [range(layers // 2), range(layers // 2, layers)]
    pipeline = TorchPipeline(adapted, blocks, group, rows)
    own = [p for i in blocks[rank] for p in adapted.model.layers[i].parameters() if p.requires_grad]  # type: ignore[union-attr,index]
    optimizer = torch.optim.AdamW(own, lr=_RATE, weight_decay=0.0, fused=True)

    def step(batches: list[Batch]) -> float:
        loss = pipeline.walk(batches)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _default_group(store: str, rank: int) -> dist.ProcessGroup:
    # transformers reads these even where a group has been made
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE))
    shared = FileStore(store, WORLD_SIZE)
    timeout = timedelta(seconds=_TIMEOUT_S)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=WORLD_SIZE, timeout=timeout)
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _together(batches: list[Batch]) -> Batch:
    """The rows, all of one length, as one micro-batch."""
    layout = batches[0].layout
    many = type(layout)(layout.lengths * len(batches), layout.positions * len(batches))
    return Batch(torch.cat([b.ids_BS for b in batches]), torch.cat([b.targets_N for b in batches]), many)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6]))
