"""Granite: Llama with constant factors on embeddings, sums, attention and logits."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, Names, biased_linears, decoder
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import GraniteConfig

_NAMES = Names(classifier=None)


def granite(config: "GraniteConfig") -> Decoder:
    """How a Granite config is walked."""
    return decoder(
        config,
        (Layer(rope_of(config)),) * config.num_hidden_layers,
        biased=biased_linears(config),
        names=_NAMES,
        attention_scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )
