"""GPT-NeoX (Pythia): one linear with query, key and value head by head; attention and MLP at once, as a rule."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, Names, decoder, one_key_a_query
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import GPTNeoXConfig

_NAMES = Names(
    blocks="gpt_neox.layers",
    embedding="gpt_neox.embed_in",
    last_norm="gpt_neox.final_layer_norm",
    head="embed_out",
    qkv=("attention.query_key_value",),
    o="attention.dense",
    into=("mlp.dense_h_to_4h",),
    out="mlp.dense_4h_to_h",
)


def gpt_neox(config: "GPTNeoXConfig") -> Decoder:
    """How a GPT-NeoX config is walked."""
    attention = (*_NAMES.qkv, _NAMES.o) if config.attention_bias else ()
    return decoder(
        config,
        (Layer(rope_of(config)),) * config.num_hidden_layers,
        biased=(*attention, *_NAMES.into, _NAMES.out),
        names=_NAMES,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        **one_key_a_query(config),
        padding=None,
        gated=False,
        by_head=True,
        parallel=config.use_parallel_residual,
    )
