"""What a device is measured at: the typical half-batch of a job."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.job import Job
from potluck.models.families import decoder_of, for_task
from potluck.models.families.decoder import Decoder, SequenceHead
from potluck.models.families.fields import Fields, fields_of
from potluck.pool.halves import deal
from potluck.pool.profile import Work
from potluck.texts.batch import Example
from potluck.texts.collate import collate
from potluck.texts.order import Order, micro_batches

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_MICRO_BATCHES = 200


def work_of(job: Job, config: "PretrainedConfig", examples: Sequence[Example], owners: int = 1) -> Work:
    """The work of a job's typical half-batch: rows, and the mean length and supervised positions of one.

    Args:
        job: its ``dtype`` is resolved.
        config: the model's transformers config.
        examples: of one of the owners.
        owners: devices that bring data; a step's examples are divided among them.

    Raises:
        ValueError: ``job.dtype`` is still ``auto``, or there is no example.
    """
    if job.dtype == "auto":
        raise ValueError("the dtype of the work must be resolved: it decides what a device is measured at")
    examples_a_turn = math.ceil(job.batch_size / owners)
    micro = min(job.micro_batch_size or examples_a_turn, examples_a_turn)
    if owners == 1:
        micro = min(micro, len(examples))  # another owner may have more of them
    order = Order([len(example.ids) for example in examples], examples_a_turn, job.seed)
    lengths: list[int] = []
    supervised: list[int] = []
    steps = math.ceil(_MICRO_BATCHES * micro / examples_a_turn)
    for step in range(min(steps, order.batches_per_epoch)):
        for indices in micro_batches(order.indices(step), micro):
            layout = collate([examples[i] for i in indices]).layout
            for half in deal(layout, None, job.half_batches):
                lengths.append(half.shape_BS[1])
                supervised.append(len(half.positions_N))
    rows, length = math.ceil(micro / job.half_batches), round(sum(lengths) / len(lengths))
    return Work(
        config=fields_of(config),
        rows=rows,
        length=length,
        supervised=min(max(1, round(sum(supervised) / len(supervised))), rows * length),
        longest=max(len(example.ids) for example in examples),
        dtype=job.dtype,
        train=job.train,
        lora=job.lora,
        ia3=job.ia3,
        checkpointing=job.checkpointing,
        optimizer=job.optimizer,
        sequence=job.task != "causal-lm",
    )


def decoder_of_work(work: Work) -> Decoder:
    """The description of the work's model; a head of sequences is that of two classes: more of them cost no more.

    Raises:
        BadInput: the model cannot be used, or not for this.
    """
    return for_task(decoder_of(Fields(work.config)), SequenceHead("classes", 2) if work.sequence else None)


def message_bytes(work: Work, wire: str) -> int:
    """Of one half-batch between two pieces, ``B * S * D`` in the wire's dtype."""
    hidden_size = decoder_of(Fields(work.config)).hidden_size
    item_bytes = {"fp32": 4, "bf16": 2}["fp32" if work.dtype == "fp64" else wire]
    return work.rows * work.length * hidden_size * item_bytes
