"""What a device is measured at: the typical half-batch of a job."""

import json
import math
from collections.abc import Sequence

from transformers import CONFIG_MAPPING, PretrainedConfig

from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import decoder_of, for_task
from potluck.models.families.decoder import Decoder, SequenceHead
from potluck.pool.halves import deal
from potluck.pool.profile import Work
from potluck.texts.batch import Example
from potluck.texts.collate import collate
from potluck.texts.order import Order, micro_batches

_MICRO_BATCHES = 200
_OF_THIS_COPY = ("_name_or_path", "transformers_version")  # differ where the model is the same


def work_of(job: Job, config: PretrainedConfig, examples: Sequence[Example], owners: int = 1) -> Work:
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
        config=config_fields(config),
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


def config_fields(config: PretrainedConfig) -> dict[str, object]:
    """The config as JSON values, equal for all copies of a model."""
    fields: dict[str, object] = json.loads(config.to_json_string(use_diff=False))
    return {name: value for name, value in fields.items() if name not in _OF_THIS_COPY}


def config_of(work: Work) -> PretrainedConfig:
    """The transformers config of the work's model.

    Raises:
        BadInput: the fields are not those of a config that this transformers knows.
    """
    fields = dict(work.config)
    model_type = fields.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise BadInput(f"The profile's model is of type '{model_type}', which this transformers does not know.")
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type](**fields)
    except Exception as error:  # a config's own checks raise what they like
        raise BadInput(f"The profile's model config cannot be used: {' '.join(str(error).split())[:200]}.") from None
    return config


def decoder_of_work(work: Work) -> Decoder:
    """The description of the work's model; a head of sequences is that of two classes: more of them cost no more.

    Raises:
        BadInput: the model cannot be used, or not for this.
    """
    return for_task(decoder_of(config_of(work)), SequenceHead("classes", 2) if work.sequence else None)


def message_bytes(work: Work, wire: str) -> int:
    """Of one half-batch between two pieces, ``B * S * D`` in the wire's dtype."""
    hidden_size = int(config_of(work).get_text_config().hidden_size)
    item_bytes = {"fp32": 4, "bf16": 2}["fp32" if work.dtype == "fp64" else wire]
    return work.rows * work.length * hidden_size * item_bytes
