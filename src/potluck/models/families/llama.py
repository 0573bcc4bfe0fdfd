"""Llama and the models built like it, SmolLM2 among them."""

from transformers import LlamaConfig

from potluck.models.families.decoder import Decoder, Layer, biased_linears, decoder
from potluck.models.families.rope import rope_of


def llama(config: LlamaConfig) -> Decoder:
    """How a Llama config is walked."""
    rope = rope_of(config)
    return decoder(config, (Layer(rope),) * config.num_hidden_layers, biased=biased_linears(config))
