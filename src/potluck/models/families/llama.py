"""Llama and the models built like it, SmolLM2 among them."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, biased_linears, decoder
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import LlamaConfig


def llama(config: "LlamaConfig") -> Decoder:
    """How a Llama config is walked."""
    rope = rope_of(config)
    return decoder(config, (Layer(rope),) * config.num_hidden_layers, biased=biased_linears(config))
