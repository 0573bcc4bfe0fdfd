"""OLMo 2: no norm before attention and MLP but one behind each, and queries and keys normed over all heads."""

from typing import TYPE_CHECKING

from potluck.models.families.decoder import Decoder, Layer, Names, biased_linears, decoder
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import Olmo2Config

_NAMES = Names(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def olmo2(config: "Olmo2Config") -> Decoder:
    """How an OLMo 2 config is walked."""
    layers = (Layer(rope_of(config)),) * config.num_hidden_layers
    return decoder(config, layers, biased=biased_linears(config), names=_NAMES, head_norms="all")
