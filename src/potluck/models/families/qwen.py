"""Qwen2 (biases on query, key and value) and Qwen3 (a norm on each query and key head)."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, Names, biased_linears, decoder, layer_types_of
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import Qwen2Config, Qwen3Config


def qwen2(config: "Qwen2Config") -> Decoder:
    """How a Qwen2 config is walked."""
    return decoder(config, _layers(config), biased=Names().qkv)


def qwen3(config: "Qwen3Config") -> Decoder:
    """How a Qwen3 config is walked."""
    return decoder(config, _layers(config), biased=biased_linears(config), head_norms="each")


def _layers(config: "Qwen2Config | Qwen3Config") -> tuple[Layer, ...]:
    rope = rope_of(config)
    windows = {"sliding_attention": config.sliding_window}
    return tuple(Layer(rope, windows.get(kind)) for kind in layer_types_of(config))
