"""The sets of devices and the shapes of models that strategies are compared on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from potluck.errors import BadInput
from potluck.job_sections import Task
from potluck.models.families.decoder import Decoder
from potluck.models.random_weights import RandomWeights
from potluck.models.sequence_head import trains_hidden
from potluck.models.tables import tables
from potluck.testbed.options import LOAD_PER_CORE, scale_speeds

SETS = {
    "A": (1.42, 1.0, 1.0),
    "B": (1.42, 1.2, 1.0, 1.0),
    "C": (1.42, 1.42, 1.2, 1.2, 1.0),
    "D": (4.0, 2.0, 1.0, 1.0),
}
"""Speeds in proportion. A to C are those of the CPUs in the paper on Xronos (arXiv 2609.19909), D is more uneven."""

_TRAINED_BYTES = 16  # of an element: value, gradient and AdamW's two moments in float32
_POSITIONS = 2048


@dataclass(frozen=True)
class Shape:
    """A model of a family, by its sizes; its weights are random."""

    model_type: str
    fields: Mapping[str, Any]
    """Of its config, beside ``vocab_size``, and as the family calls them."""
    vocab_rows: int
    task: Task = "causal-lm"

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """As transformers describes it, with all of its blocks or the first ``layers`` of them."""
        config: PretrainedConfig = CONFIG_MAPPING[self.model_type](**{"vocab_size": self.vocab_rows, **self.fields})
        if layers is not None:
            config.num_hidden_layers = layers
        return config

    @property
    def layers(self) -> int:
        """Blocks of the whole model."""
        return int(self.config().num_hidden_layers)


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, columns: int, vocab_rows: int, *, tied: bool) -> Shape:
    fields = {
        "hidden_size": hidden,
        "intermediate_size": columns,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": _POSITIONS,
        "tie_word_embeddings": tied,
    }
    return Shape("llama", fields, vocab_rows)


SHAPES = {
    "smollm2-135m": _llama(576, 30, 9, 3, 1536, 49152, tied=True),
    "smollm2-360m": _llama(960, 32, 15, 5, 2560, 49152, tied=True),
    "llama-1b": _llama(2048, 16, 32, 8, 8192, 32000, tied=True),
    "mobilellama-1.4b": _llama(2048, 24, 16, 16, 5632, 32000, tied=False),
    "gpt2-medium": Shape("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": 1024}, 50257),
    "roberta-base": Shape(
        "roberta",
        {
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
        50265,
        task="sequence-classification",
    ),
}
"""By name; an encoder learns to tell two classes apart, others to say what follows."""


def speeds_of(name: str, load: float, cores: int) -> list[float]:
    """Each device's part of a core, in proportion to the set: at most 1, and ``load`` cores together.

    Raises:
        BadInput: there is no such set, or the cores cannot pace that much: messages need what is left of them.
    """
    if name not in SETS:
        described = ", ".join(f"{each} ({':'.join(f'{ratio:g}' for ratio in SETS[each])})" for each in SETS)
        raise BadInput(f"--set: there is no set '{name}'; there are {described}.")
    most = LOAD_PER_CORE * cores
    if not 0 < load <= most:
        raise BadInput(
            f"--load: the {len(SETS[name])} devices of set {name} cannot be paced on {load:g} cores: this machine has"
            f" {cores}, of which at most {most:g} may be computed on, because messages need the rest."
        )
    return scale_speeds(SETS[name], cores, load / cores)


def shape_of(name: str, layers: int | None) -> Shape:
    """A shape by its name; ``layers`` is checked.

    Raises:
        BadInput: there is no such shape, or it has not so many blocks.
    """
    if name not in SHAPES:
        raise BadInput(f"--shape: there is no shape '{name}'; there are {', '.join(SHAPES)}.")
    shape = SHAPES[name]
    if layers is not None and not 1 <= layers <= shape.layers:
        raise BadInput(f"--layers: {name} has 1 to {shape.layers} blocks, not {layers}.")
    return shape


def model_bytes(decoder: Decoder, train: str, dtype: str) -> int:
    """Memory of one whole model: its weights, and gradients and AdamW's moments where all of them are trained.

    The embedding is read from disk row by row, and is not counted beside a head of its own.
    """
    weights = RandomWeights(decoder)
    ends = tables(decoder)
    blocks = sum(math.prod(weights.shape(name)) for name in weights.names if name not in ends)
    item_bytes = {"fp32": 4, "bf16": 2}[dtype]
    head = decoder.head_rows * decoder.hidden_size * item_bytes
    if decoder.sequence is not None:
        hidden = decoder.hidden_size * trains_hidden(decoder, full=train == "full")
        head += (decoder.hidden_size + 1) * (hidden + decoder.sequence.size) * _TRAINED_BYTES
    return head + blocks * (_TRAINED_BYTES if train == "full" else item_bytes)
