"""GPT-2: learned positions, and linears stored as ``[in, out]``, one of which gives query, key and value."""

from typing import TYPE_CHECKING

from potluck.errors import BadInput
from potluck.models.families.activations import activation
from potluck.models.families.decoder import Decoder, Layer, Names, decoder, one_key_a_query

if TYPE_CHECKING:
    from transformers import GPT2Config

_NAMES = Names(
    blocks="transformer.h",
    embedding="transformer.wte",
    positions="transformer.wpe",
    last_norm="transformer.ln_f",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    into=("mlp.c_fc",),
    out="mlp.c_proj",
    before_attention="ln_1",
    before_mlp="ln_2",
)


def gpt2(config: "GPT2Config") -> Decoder:
    """How a GPT-2 config is walked.

    Raises:
        BadInput: it attends to another sequence, or scales attention by its block's number.
    """
    if config.add_cross_attention or config.scale_attn_by_inverse_layer_idx:
        raise BadInput("GPT-2 models with cross attention or scale_attn_by_inverse_layer_idx are not supported.")
    differs = {} if config.scale_attn_weights else {"attention_scale": 1.0}
    return decoder(
        config,
        (Layer(None),) * config.num_hidden_layers,
        intermediate_size=config.n_inner or 4 * config.hidden_size,
        activation=activation(config.activation_function),
        biased=(*_NAMES.qkv, _NAMES.o, *_NAMES.into, _NAMES.out),
        names=_NAMES,
        norm="layer",
        norm_eps=config.layer_norm_epsilon,
        **one_key_a_query(config),
        padding=None,
        gated=False,
        inputs_first=True,
        **differs,
    )
