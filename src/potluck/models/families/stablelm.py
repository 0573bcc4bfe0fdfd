"""StableLM: norms with mean and bias, heads turned in part, and attention and MLP one after the other or at once."""

from typing import TYPE_CHECKING

from potluck.errors import BadInput
from potluck.models.families.decoder import Decoder, Layer, Names, decoder
from potluck.models.families.rope import rope_of

if TYPE_CHECKING:
    from transformers import StableLmConfig

_PARALLEL = Names(before_mlp="input_layernorm")


def stablelm(config: "StableLmConfig") -> Decoder:
    """How a StableLM config is walked.

    Raises:
        BadInput: each head has a norm of its own.
    """
    if config.qk_layernorm:
        raise BadInput("This StableLM model has a norm of its own for each head (qk_layernorm), which potluck has not.")
    names = _PARALLEL if config.use_parallel_residual else Names()
    return decoder(
        config,
        (Layer(rope_of(config)),) * config.num_hidden_layers,
        biased=names.qkv if config.use_qkv_bias else (),
        names=names,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        parallel=config.use_parallel_residual,
    )
