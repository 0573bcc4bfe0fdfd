"""Gemma 3 (text): norms on both sides, weights stored as the distance from one, sliding and global blocks."""

from transformers import Gemma3TextConfig

from potluck.errors import BadInput
from potluck.models.families.decoder import Decoder, Layer, decoder, layer_types_of
from potluck.models.families.rope import rope_of


def gemma3(config: Gemma3TextConfig) -> Decoder:
    """How a Gemma 3 text config is walked.

    ``attn_logit_softcapping`` is not applied: transformers reads it for Gemma 3 and does not use it either.

    Raises:
        BadInput: the model attends in both directions (an embedding model).
    """
    if config.use_bidirectional_attention:
        raise BadInput("This Gemma 3 model attends in both directions (an embedding model); potluck trains decoders.")
    ropes = {kind: rope_of(config, kind) for kind in set(layer_types_of(config))}
    layers = tuple(
        Layer(ropes[kind], config.sliding_window if kind == "sliding_attention" else None)
        for kind in layer_types_of(config)
    )
    return decoder(
        config,
        layers,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        norm_offset=1.0,
        norms_of_sums=True,
        head_norms=True,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping,
    )
