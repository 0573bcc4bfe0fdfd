"""A model of real shapes without its weights: to measure what it costs where the model is not."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PretrainedConfig

from potluck.chain.ranges import Ranges
from potluck.models.families.decoder import ATTENTION, MLP, Decoder

_DRAWN = 1 << 20
_SPREAD = 0.02


class RandomWeights:
    """The tensors of a decoder's blocks and head by name, made as they are read.

    Matrices repeat some normal values of standard deviation 0.02, norms are 1: what a walk costs does not depend on
    values, as long as none is denormal.
    """

    def __init__(self, config: PretrainedConfig, decoder: Decoder) -> None:
        """Make tensors for the blocks of ``decoder``, which may be fewer than the config has."""
        self._shapes = _shapes(config, decoder)
        self._drawn = torch.randn(_DRAWN, generator=torch.Generator().manual_seed(0)) * _SPREAD

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._shapes))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._shapes[name]

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
        columns: Ranges | None = None,
    ) -> Tensor:
        """A tensor, or one of the shape that these rows and columns of it have."""
        shape = list(self._shapes[name])
        for dim, ranges in enumerate((rows, columns)):
            if ranges is not None:
                shape[dim] = len(ranges)
        return self._filled(shape, dtype)

    def rows(self, name: str, ids: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of the shape ``(len(ids), *shape(name)[1:])``."""
        return self._filled([len(ids), *self._shapes[name][1:]], dtype)

    def _filled(self, shape: Sequence[int], dtype: torch.dtype | None) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        filled = torch.empty(math.prod(shape), dtype=dtype)
        for part in filled.split(_DRAWN):
            part.copy_(self._drawn[: part.numel()])
        return filled.view(*shape)


def _shapes(config: PretrainedConfig, decoder: Decoder) -> dict[str, tuple[int, ...]]:
    D, F = decoder.hidden_size, decoder.intermediate_size
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    linears = dict(zip(ATTENTION, [(queries, D), (keys, D), (keys, D), (D, queries)], strict=True))
    linears |= dict(zip(MLP, [(F, D), (F, D), (D, F)], strict=True))
    block: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linears.items()}
    block |= {f"{name}.bias": linears[name][:1] for name in _with_bias(config)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if decoder.norms_of_sums:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    block |= {f"{norm}.weight": (D,) for norm in norms}
    if decoder.head_norms:
        block |= {f"self_attn.{norm}.weight": (decoder.head_dim,) for norm in ("q_norm", "k_norm")}
    ends = {"model.embed_tokens.weight": (decoder.vocab_size, D), "model.norm.weight": (D,)}
    if not decoder.tied:
        ends["lm_head.weight"] = (decoder.vocab_size, D)
    layers = range(len(decoder.layers))
    return ends | {f"model.layers.{i}.{name}": shape for i in layers for name, shape in block.items()}


def _with_bias(config: PretrainedConfig) -> list[str]:
    """The linears of a block that have a bias."""
    if config.model_type == "qwen2":  # always, without a field that says so
        return list(ATTENTION[:3])
    attention = ATTENTION if getattr(config, "attention_bias", False) else ()
    return [*attention, *(MLP if getattr(config, "mlp_bias", False) else ())]
