"""Gemma 2 and 3 (text): norms on both sides, weights stored as the distance from one, sliding and global blocks."""

from typing import TYPE_CHECKING, Any

from potluck.errors import BadInput
from potluck.models.families.decoder import Decoder, Layer, Names, biased_linears, decoder, layer_types_of
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import Gemma2Config, Gemma3TextConfig

_NAMES = Names(
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma2(config: "Gemma2Config") -> Decoder:
    """How a Gemma 2 config is walked.

    Raises:
        BadInput: the model attends in both directions (an embedding model).
    """
    rope = rope_of(config)
    layers = tuple(Layer(rope, _window(config, kind)) for kind in layer_types_of(config))
    return _gemma(config, layers, attention_softcap=config.attn_logit_softcapping)


def gemma3(config: "Gemma3TextConfig") -> Decoder:
    """How a Gemma 3 text config is walked.

    ``attn_logit_softcapping`` is not applied: transformers reads it for Gemma 3 and does not use it either.

    Raises:
        BadInput: the model attends in both directions (an embedding model).
    """
    ropes = {kind: rope_of(config, kind) for kind in set(layer_types_of(config))}
    layers = tuple(Layer(ropes[kind], _window(config, kind)) for kind in layer_types_of(config))
    return _gemma(config, layers, head_norms="each")


def _gemma(config: "Gemma2Config | Gemma3TextConfig", layers: tuple[Layer, ...], **differs: Any) -> Decoder:
    if getattr(config, "use_bidirectional_attention", False):
        raise BadInput("This Gemma model attends in both directions (an embedding model); potluck trains decoders.")
    return decoder(
        config,
        layers,
        biased=biased_linears(config),
        names=_NAMES,
        attention_scale=config.query_pre_attn_scalar**-0.5,
        norm_offset=1.0,
        embedding_scale=config.hidden_size**0.5,
        logit_softcap=config.final_logit_softcapping,
        **differs,
    )


def _window(config: "Gemma2Config | Gemma3TextConfig", layer_type: str) -> int | None:
    window: int | None = config.sliding_window
    return window if layer_type == "sliding_attention" else None
