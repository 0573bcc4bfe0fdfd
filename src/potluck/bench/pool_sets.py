"""The sets of devices and the shapes of models that strategies are compared on."""

import math
from dataclasses import dataclass

from transformers import LlamaConfig, PretrainedConfig

from potluck.errors import BadInput
from potluck.models.families import decoder_of
from potluck.models.random_weights import RandomWeights
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
    """A Llama, by its sizes; its weights are random."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    columns: int
    vocab_rows: int
    tied: bool

    def config(self, layers: int | None = None) -> PretrainedConfig:
        """As transformers describes it, with all of its blocks or the first ``layers`` of them."""
        return LlamaConfig(
            vocab_size=self.vocab_rows,
            hidden_size=self.hidden,
            intermediate_size=self.columns,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=_POSITIONS,
            tie_word_embeddings=self.tied,
        )


SHAPES = {
    "smollm2-135m": Shape(576, 30, 9, 3, 1536, 49152, tied=True),
    "smollm2-360m": Shape(960, 32, 15, 5, 2560, 49152, tied=True),
    "llama-1b": Shape(2048, 16, 32, 8, 8192, 32000, tied=True),
    "mobilellama-1.4b": Shape(2048, 24, 16, 16, 5632, 32000, tied=False),
}


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


def config_of_shape(name: str, layers: int | None) -> PretrainedConfig:
    """A shape's config, with fewer blocks where ``layers`` says so.

    Raises:
        BadInput: there is no such shape, or it has not so many blocks.
    """
    if name not in SHAPES:
        raise BadInput(f"--shape: there is no shape '{name}'; there are {', '.join(SHAPES)}.")
    shape = SHAPES[name]
    if layers is not None and not 1 <= layers <= shape.layers:
        raise BadInput(f"--layers: {name} has 1 to {shape.layers} blocks, not {layers}.")
    return shape.config(layers)


def model_bytes(config: PretrainedConfig, train: str, dtype: str) -> int:
    """Memory of one whole model: its weights, and gradients and AdamW's moments where all of them are trained.

    The embedding is read from disk row by row, and is not counted beside a head of its own.
    """
    decoder = decoder_of(config)
    weights = RandomWeights(decoder)
    ends = tables(decoder)
    blocks = sum(math.prod(weights.shape(name)) for name in weights.names if name not in ends)
    head = decoder.vocab_size * decoder.hidden_size
    item_bytes = {"fp32": 4, "bf16": 2}[dtype]
    return head * item_bytes + blocks * (_TRAINED_BYTES if train == "full" else item_bytes)
