"""OPT: learned positions whose table has two rows in front."""

from typing import TYPE_CHECKING

from potluck.errors import BadInput
from potluck.models.families.activations import activation
from potluck.models.families.decoder import Decoder, Layer, Names, decoder, one_key_a_query

if TYPE_CHECKING:
    from transformers import OPTConfig

_NAMES = Names(
    blocks="model.decoder.layers",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    last_norm="model.decoder.final_layer_norm",
    o="self_attn.out_proj",
    into=("fc1",),
    out="fc2",
    before_attention="self_attn_layer_norm",
    before_mlp="final_layer_norm",
)
_EPS = 1e-5  # of torch.nn.LayerNorm, which transformers leaves as it is
_ROWS_IN_FRONT = 2


def opt(config: "OPTConfig") -> Decoder:
    """How an OPT config is walked.

    Raises:
        BadInput: it norms behind the sum, has no last norm, norms without weights, or embeddings of another width.
    """
    odd = {
        "do_layer_norm_before: false": not config.do_layer_norm_before,
        "_remove_final_layer_norm": config._remove_final_layer_norm,
        "layer_norm_elementwise_affine: false": not config.layer_norm_elementwise_affine,
        "word_embed_proj_dim other than hidden_size": config.word_embed_proj_dim != config.hidden_size,
    }
    if found := [what for what, is_so in odd.items() if is_so]:
        raise BadInput(f"OPT models with {' and '.join(found)} (such as opt-350m) are not supported.")
    return decoder(
        config,
        (Layer(None),) * config.num_hidden_layers,
        intermediate_size=config.ffn_dim,
        activation=activation(config.activation_function),
        biased=(*_NAMES.qkv, _NAMES.o, *_NAMES.into, _NAMES.out) if config.enable_bias else (),
        names=_NAMES,
        norm="layer",
        norm_eps=_EPS,
        **one_key_a_query(config),
        gated=False,
        position_offset=_ROWS_IN_FRONT,
    )
