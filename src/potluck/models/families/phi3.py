"""Phi-3: one linear gives query, key and value, another gate and up."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, Names, decoder
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import Phi3Config

_NAMES = Names(qkv=("self_attn.qkv_proj",), into=("mlp.gate_up_proj",))


def phi3(config: "Phi3Config") -> Decoder:
    """How a Phi-3 config is walked."""
    layer = Layer(rope_of(config), window=config.sliding_window)
    return decoder(config, (layer,) * config.num_hidden_layers, names=_NAMES)
