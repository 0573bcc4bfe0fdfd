"""Mistral: Llama with an optional sliding window in every block."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, decoder
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import MistralConfig


def mistral(config: "MistralConfig") -> Decoder:
    """How a Mistral config is walked."""
    layer = Layer(rope_of(config), window=config.sliding_window)
    return decoder(config, (layer,) * config.num_hidden_layers)
