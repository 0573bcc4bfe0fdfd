"""SmolLM3: Llama in which some blocks turn no queries and keys, and some may have a window."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, biased_linears, decoder, layer_types_of
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import SmolLM3Config


def smollm3(config: "SmolLM3Config") -> Decoder:
    """How a SmolLM3 config is walked."""
    rope = rope_of(config)
    window = config.sliding_window if config.use_sliding_window else None
    layers = tuple(
        Layer(rope if turns else None, window if kind == "sliding_attention" else None)
        for turns, kind in zip(config.no_rope_layers or (), layer_types_of(config), strict=True)
    )
    return decoder(config, layers, biased=biased_linears(config))
