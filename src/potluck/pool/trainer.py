"""One device's run of a job: read the share, take the steps, bring the result together."""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from potluck.chain.comm import Comm
from potluck.job import Job
from potluck.models.adapter import TEMPLATE_FILE, adapter_config, write_adapter
from potluck.models.build import Part, build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.precision import torch_dtype
from potluck.models.save import CheckpointWriter, copy_beside_weights
from potluck.pool.gather import gather_whole
from potluck.pool.memory import trim
from potluck.pool.owner import Feed, read_training_data
from potluck.pool.plan import Plan
from potluck.pool.step import OWNER, Settings, Stepper

Emit = Callable[[dict[str, Any]], None]


def train(job: Job, plan: Plan, comm: Comm, model_dir: Path, result_dir: Path, emit: Emit) -> Part:
    """Train this rank's part; rank 0 reads the data and writes the result into ``result_dir``.

    Raises:
        BadInput: the data or the targets cannot be used.
        DeviceLost: another device ended.
        PotluckError: the loss stopped being a finite number.
    """
    decoder = decoder_of(read_config(model_dir))
    feed = None
    if comm.rank == OWNER:
        encoded = read_training_data(job, model_dir, vocab_size=decoder.vocab_size, max_positions=decoder.max_positions)
        feed = Feed(job, encoded.examples)
        emit(
            {
                "event": "data",
                "examples": len(encoded.examples),
                "dropped": encoded.dropped,
                "cut": encoded.cut,
                "steps": feed.steps,
            }
        )
    with Checkpoint.open(model_dir) as checkpoint:
        part = build_part(
            checkpoint,
            decoder,
            plan.shares,
            comm.rank,
            compute=torch_dtype(job.dtype),
            lora=job.lora if job.train == "lora" else None,
            seed=job.seed,
        )
        trim()
        emit({"event": "loaded", "rank": comm.rank, "weights_mib": part.weight_bytes / 2**20})
        steps = comm.broadcast(torch.tensor([feed.steps if feed else 0]), OWNER).wait()
        stepper = Stepper(part, comm, settings_of(job, int(steps)))
        for step in range(int(steps)):
            report = stepper.step(feed.batches(step) if feed else None)
            if comm.rank == 0:
                emit({"event": "step", "step": step + 1, "steps": int(steps), **asdict(report)})
        if comm.rank == 0:
            emit({"event": "saving"})
        save(job, part, comm, checkpoint, model_dir, result_dir)
        if comm.rank == 0:
            emit({"event": "saved"})
    return part


def settings_of(job: Job, steps: int) -> Settings:
    """How the job's steps are taken."""
    return Settings(
        steps=steps,
        learning_rate=job.learning_rate,
        schedule=job.schedule,
        warmup=job.warmup,
        weight_decay=job.weight_decay,
        clip=job.clip,
        half_batches=job.half_batches,
        checkpointing=job.checkpointing,
        seed=job.seed,
    )


def save(job: Job, part: Part, comm: Comm, checkpoint: Checkpoint, model_dir: Path, result_dir: Path) -> None:
    """Gather what was trained on rank 0 and write it: a PEFT adapter, or a plain checkpoint in the base's dtypes."""
    whole = gather_whole(part.chain.trained, comm)
    template = Path(job.data.template)
    own_template = template.read_text(encoding="utf-8") if template.is_file() else None
    if comm.rank != 0:
        for _ in whole:
            pass
    elif job.train == "lora":
        names = {t.name.split(".lora_")[0] for t in part.chain.trained}
        targets = sorted({name.rsplit(".", 1)[-1] for name in names})
        if "all-linear" not in job.lora.targets:
            targets = job.lora.targets
        from_gguf = job.model.lower().endswith(".gguf")  # by which name stock peft could not load it
        base = str(model_dir) if from_gguf else job.model
        write_adapter(result_dir, dict(whole), adapter_config(job.lora, base, targets), chat_template=own_template)
    else:
        writer = CheckpointWriter(result_dir)
        trained = set()
        for name, tensor in whole:
            trained.add(name)
            writer.add(name, tensor.to(checkpoint.dtype(name)))
        for name in checkpoint.names:
            if name not in trained:
                writer.add(name, checkpoint.read(name))
        writer.finish()
        copy_beside_weights(model_dir, result_dir)
        if own_template is not None:
            (result_dir / TEMPLATE_FILE).write_text(own_template, encoding="utf-8")
