"""A model of real shapes without its weights: to measure what it costs where the model is not."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.chain.ranges import Ranges
from potluck.models.families.decoder import Decoder

_DRAWN = 1 << 20
_SPREAD = 0.02


class RandomWeights:
    """The tensors of a decoder's blocks and head by name, made as they are read.

    Matrices repeat some normal values of standard deviation 0.02, norms are 1: what a walk costs does not depend on
    values, as long as none is denormal.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Make tensors for the blocks of ``decoder``, which may be fewer than the model has."""
        self._shapes = _shapes(decoder)
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


def _shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    D, names = decoder.hidden_size, decoder.names
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    block: dict[str, tuple[int, ...]] = {}
    for name, cut in decoder.cuts.items():
        by_head, by_kv_head, by_column = decoder.units(name)
        units = by_head * decoder.num_heads + by_kv_head * decoder.num_kv_heads + by_column * decoder.intermediate_size
        out, into = (units, D) if cut == "column" else (D, units)
        block[f"{name}.weight"] = (into, out) if decoder.inputs_first else (out, into)
        if name in decoder.biased:
            block[f"{name}.bias"] = (out,)
    if decoder.head_norms != "none":
        normed = (queries, keys) if decoder.head_norms == "all" else (decoder.head_dim, decoder.head_dim)
        block |= {f"{norm}.weight": (size,) for norm, size in zip(names.head_norms, normed, strict=True)}
    block |= {name: (D,) for norm in decoder.norm_names() for name in _norm(decoder, norm)}
    ends: dict[str, tuple[int, ...]] = {f"{names.embedding}.weight": (decoder.vocab_size, D)}
    for end in filter(None, (names.embedding_norm, names.last_norm)):
        ends |= dict.fromkeys(_norm(decoder, end), (D,))
    if names.positions is not None:
        ends[f"{names.positions}.weight"] = (decoder.position_offset + decoder.max_positions, D)
    if names.types is not None:
        ends[f"{names.types}.weight"] = (decoder.segments, D)
    if names.classifier is not None and names.classifier.hidden_of_base:
        ends |= {f"{names.classifier.hidden}.weight": (D, D), f"{names.classifier.hidden}.bias": (D,)}
    if not decoder.tied:
        ends[f"{names.head}.weight"] = (decoder.vocab_size, D)
    layers = range(len(decoder.layers))
    return ends | {decoder.full_name(i, name): shape for i in layers for name, shape in block.items()}


def _norm(decoder: Decoder, name: str) -> list[str]:
    return [f"{name}.weight", *([f"{name}.bias"] if decoder.norm == "layer" else [])]
