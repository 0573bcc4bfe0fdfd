"""Rotary angles, for every rope type transformers knows.

All but the usual ones are computed by the functions transformers computes them with, which just the devices of such
models import.
"""

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from potluck.chain.attention import Rope
from potluck.models.families.fields import Fields, config_from

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_DEPEND_ON_LENGTH = ("dynamic", "longrope")

Frequencies = Callable[[int], tuple[Tensor, float]]
"""Of a length: what each pair of a head's values turns by from position to position, and a factor of both tables."""


def rope_of(config: "PretrainedConfig", layer_type: str | None = None) -> Rope:
    """Tables of ``cos`` and ``sin``; angles in float32, as in transformers, whatever the compute dtype.

    They are narrower than a head where just its first part is turned.

    ``layer_type`` names the blocks' kind in families with a rope for each.
    """
    parameters: dict[str, Any] = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    kind = parameters["rope_type"]
    if kind == "default":
        frequencies = _default_frequencies(config, parameters)
    else:
        frequencies = _frequencies_of_transformers(config, kind, layer_type)

    @lru_cache(maxsize=64)
    def tables(S: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        inverse_F, scale = frequencies(S)
        angles_SF = torch.arange(S, dtype=torch.float)[:, None] * inverse_F
        angles_SK = torch.cat((angles_SF, angles_SF), dim=-1)
        return (angles_SK.cos() * scale).to(dtype), (angles_SK.sin() * scale).to(dtype)

    return tables


def _default_frequencies(config: "PretrainedConfig", parameters: Mapping[str, Any]) -> Frequencies:
    def frequencies(S: int) -> tuple[Tensor, float]:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        turned = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        exponents_F = torch.arange(0, turned, 2, dtype=torch.float) / turned
        return 1.0 / (parameters["rope_theta"] ** exponents_F), 1.0

    return frequencies


def _frequencies_of_transformers(config: "PretrainedConfig", kind: str, layer_type: str | None) -> Frequencies:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    whole = config_from(vars(config)) if isinstance(config, Fields) else config
    of_layer = {} if layer_type is None else {"layer_type": layer_type}

    def frequencies(S: int) -> tuple[Tensor, float]:
        length = {"seq_len": S} if kind in _DEPEND_ON_LENGTH else {}
        inverse_F, scale = ROPE_INIT_FUNCTIONS[kind](whole, None, **length, **of_layer)
        return inverse_F, scale

    return frequencies
