"""One device's run of a job: read the share, take the steps, bring the result together."""

import math
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
from potluck.models.memory import trim
from potluck.models.precision import torch_dtype
from potluck.models.save import CheckpointWriter, copy_beside_weights
from potluck.models.shards import Need
from potluck.pool.gather import gather_whole
from potluck.pool.owner import Feed, read_training_data
from potluck.pool.plan import Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.turns import Turn, Turns
from potluck.texts.batch import Example

Emit = Callable[[dict[str, Any]], None]


def train(
    job: Job,
    plan: Plan,
    comm: Comm,
    model_dir: Path,
    result_dir: Path | None,
    emit: Emit,
    *,
    owns: bool,
    need: Need | None = None,
) -> Part:
    """Train this rank's part; rank 0 writes the result into ``result_dir``.

    Args:
        job: alike on all devices, but for the paths of an owner's own data.
        plan: what every rank holds.
        comm: the messages.
        model_dir: the model, or what is here of it.
        result_dir: where rank 0 puts the result.
        emit: told each event.
        owns: whether this device has training data.
        need: fetches what of the model is not here yet.

    Raises:
        BadInput: the data or the targets cannot be used.
        DeviceLost: another device ended.
        PotluckError: the loss stopped being a finite number.
    """
    rank = comm.rank
    decoder = decoder_of(read_config(model_dir))
    examples: list[Example] = []
    if owns:
        encoded = read_training_data(job, model_dir, vocab_size=decoder.vocab_size, max_positions=decoder.max_positions)
        examples = encoded.examples
        counted = {"examples": len(examples), "dropped": encoded.dropped, "cut": encoded.cut}
        emit({"event": "data", "rank": rank, **counted})
    with Checkpoint.open(model_dir, need) as checkpoint:
        lora = job.lora if job.train == "lora" else None
        part = build_part(
            checkpoint,
            decoder,
            plan.shares,
            rank,
            compute=torch_dtype(job.dtype),
            lora=lora,
            seed=job.seed,
        )
        trim()
        emit({"event": "loaded", "rank": rank, "weights_mib": part.weight_bytes / 2**20})
        turns = Turns(comm.all_gather(torch.tensor([len(examples)])).wait()[:, 0].tolist(), job.batch_size)
        feed = None
        if owns:
            feed = Feed(
                examples,
                examples_a_turn=turns.examples_a_turn,
                micro_batch_size=job.micro_batch_size,
                seed=job.seed,
            )
        steps = job.steps or max(1, math.ceil(job.epochs * turns.steps_per_epoch))
        if rank == 0:
            emit({"event": "begin", "steps": steps})
        stepper = Stepper(part, comm, settings_of(job, steps))
        for step in range(steps):
            report = stepper.step(
                [Turn(owner, feed.batches(turn) if feed and owner == rank else None) for owner, turn in turns.of(step)]
            )
            if rank == 0:
                emit({"event": "step", "step": step + 1, "steps": steps, **asdict(report)})
                for owner in turns.run_out_after(step):
                    emit({"event": "ran_out", "owner": owner, "step": step + 1})
        if rank == 0:
            emit({"event": "saving"})
        save(job, part, comm, checkpoint, model_dir, result_dir)
        if rank == 0:
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


def save(job: Job, part: Part, comm: Comm, checkpoint: Checkpoint, model_dir: Path, result_dir: Path | None) -> None:
    """Gather what was trained on rank 0 and write it: a PEFT adapter, or a plain checkpoint in the base's dtypes."""
    whole = gather_whole(part.chain.trained, comm)
    if comm.rank != 0:
        for _ in whole:
            pass
        return
    assert result_dir is not None
    own_template = job.data.own_template()
    if job.train == "lora":
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
