"""A model of real shapes without its weights: to measure what it costs where the model is not."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from potluck.chain.ranges import Ranges
from potluck.models.families.decoder import Decoder
from potluck.models.shapes import shapes_of

_DRAWN = 1 << 20
_SPREAD = 0.02


class RandomWeights:
    """The tensors of a decoder's blocks and head by name, made as they are read.

    Matrices repeat some normal values of standard deviation 0.02, norms are 1: what a walk costs does not depend on
    values, as long as none is denormal.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Make tensors for the blocks of ``decoder``, which may be fewer than the model has."""
        self._shapes = shapes_of(decoder)
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
