"""Qwen2 (biases on query, key and value) and Qwen3 (a norm on each query and key head)."""

from transformers import Qwen2Config, Qwen3Config

from potluck.models.families.decoder import Decoder, Layer, decoder, layer_types_of
from potluck.models.families.rope import rope_of


def qwen2(config: Qwen2Config) -> Decoder:
    """How a Qwen2 config is walked."""
    rope = rope_of(config)
    return decoder(config, tuple(Layer(rope, _window(config, kind)) for kind in layer_types_of(config)))


def qwen3(config: Qwen3Config) -> Decoder:
    """How a Qwen3 config is walked."""
    rope = rope_of(config)
    layers = tuple(Layer(rope, _window(config, kind)) for kind in layer_types_of(config))
    return decoder(config, layers, head_norms=True)


def _window(config: Qwen2Config | Qwen3Config, layer_type: str) -> int | None:
    window: int | None = config.sliding_window
    return window if layer_type == "sliding_attention" else None
