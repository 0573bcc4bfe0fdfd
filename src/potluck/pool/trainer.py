"""One device's run of a job: read the share, take the steps, bring the result together."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.adapter import TEMPLATE_FILE, adapter_config, linear_of, write_adapter
from potluck.models.build import Part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families.decoder import Decoder
from potluck.models.memory import trim
from potluck.models.precision import torch_dtype
from potluck.models.save import CheckpointWriter, copy_beside_weights
from potluck.models.sequence_head import adapter_targets, is_of_base, modules_to_save, write_sequence_config
from potluck.models.shapes import check_shapes
from potluck.models.shards import Need
from potluck.pool.embeddings import why_not
from potluck.pool.owner import Feed, read_training_data
from potluck.pool.plan import Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.build import part_for, rows_dealt_at_once, strategy_for
from potluck.pool.turns import Turn, Turns
from potluck.texts.batch import Example

Emit = Callable[[dict[str, Any]], None]


def train(
    job: Job,
    plan: Plan,
    decoder: Decoder,
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
        decoder: the description of the model for the job's task.
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
    plan = replace(plan, micro_batch_size=plan.micro_batch_size or job.micro_batch_size)
    if job.task == "sequence-classification" and not job.data.labels:
        raise BadInput("data.labels names no classes, and every device must know how many there are.")
    examples: list[Example] = []
    if owns:
        encoded = read_training_data(job, model_dir, decoder)
        examples = encoded.examples
        most = min(job.data.max_length, decoder.max_positions)
        counted = {"examples": len(examples), "dropped": encoded.dropped, "cut": encoded.cut, "most": most}
        emit({"event": "data", "rank": rank, **counted})
    with Checkpoint.open(model_dir, need) as checkpoint:
        check_shapes(checkpoint, decoder)
        part = part_for(
            plan,
            rank,
            checkpoint,
            decoder,
            compute=torch_dtype(job.dtype),
            adapter=job.adapter,
            seed=job.seed,
            train_embeddings=job.train_embeddings,
        )
        trim()
        emit({"event": "loaded", "rank": rank, "weights_mib": part.weight_bytes / 2**20})
        counts = comm.all_gather(torch.tensor([len(examples)])).wait()[:, 0].tolist()
        if reason := why_not(job, decoder, plan.strategy, comm.world_size, sum(map(bool, counts))):
            raise BadInput(reason)
        turns = Turns(counts, job.batch_size)
        feed = None
        if owns:
            feed = Feed(
                examples,
                examples_a_turn=turns.examples_a_turn,
                micro_batch_size=rows_dealt_at_once(plan),
                seed=job.seed,
            )
        steps = job.steps or max(1, math.ceil(job.epochs * turns.steps_per_epoch))
        if rank == 0:
            emit({"event": "begin", "steps": steps})
        settings = settings_of(job, steps)
        strategy = strategy_for(plan, part, comm, settings)
        stepper = Stepper(part, comm, settings, strategy)
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
        save(job, strategy.whole(), comm.rank, checkpoint, decoder, model_dir, result_dir)
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
        optimizer=job.optimizer,
    )


def save(
    job: Job,
    whole: Iterator[tuple[str, Tensor]],
    rank: int,
    checkpoint: Checkpoint,
    decoder: Decoder,
    model_dir: Path,
    result_dir: Path | None,
) -> None:
    """Write on rank 0 what was trained: a PEFT adapter, or a plain checkpoint in the base's dtypes.

    Args:
        job: says which of the two.
        whole: each trained tensor by name, as :meth:`potluck.pool.strategies.strategy.Strategy.whole` gives it.
        rank: this device.
        checkpoint: the model that was trained.
        decoder: its description.
        model_dir: where it lies.
        result_dir: on rank 0, an existing directory.

    Raises:
        DeviceLost: another device ended.
        OSError, SafetensorError: a file could not be written (see :func:`potluck.models.save.replace_directory`).
    """
    if rank != 0:
        for _ in whole:
            pass
        return
    assert result_dir is not None
    own_template = job.data.own_template()
    if job.adapter is not None:
        adapters = dict(whole)
        adapted = {linear for name in adapters if (linear := linear_of(name)) is not None}
        of_head = [name for name in adapters if linear_of(name) is None]
        targets, feedforward = adapter_targets(job.adapter, adapted, decoder)
        from_gguf = job.model.lower().endswith(".gguf")  # by which name stock peft could not load it
        base = str(model_dir) if from_gguf else job.model
        config = adapter_config(
            job.adapter,
            base,
            targets,
            feedforward=feedforward,
            inputs_first=decoder.inputs_first,
            modules_to_save=modules_to_save(of_head, decoder),
            blocks=range(decoder.frozen_blocks, len(decoder.layers)) if decoder.frozen_blocks and adapted else (),
        )
        write_adapter(result_dir, adapters, config, chat_template=own_template)
    else:
        writer = CheckpointWriter(result_dir)
        trained = set()
        sequence = decoder.sequence
        dtype_of_head = checkpoint.dtype(f"{decoder.names.embedding}.weight")
        for name, tensor in whole:
            trained.add(name)
            writer.add(name, tensor.to(checkpoint.dtype(name) if name in checkpoint.names else dtype_of_head))
        table, head = (f"{name}.weight" for name in (decoder.names.embedding, decoder.names.head))
        stale = {head} if decoder.embedding_is_head and table in trained else set()  # some checkpoints have it twice
        for name in checkpoint.names:
            if name not in trained | stale and (sequence is None or is_of_base(name, decoder)):
                writer.add(name, checkpoint.read(name))
        writer.finish()
        copy_beside_weights(model_dir, result_dir)
        if sequence is not None:
            write_sequence_config(result_dir, sequence.kind, job.data.labels, sequence.size)
        if own_template is not None:
            (result_dir / TEMPLATE_FILE).write_text(own_template, encoding="utf-8")
