"""Where the tensors of a model come from."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from potluck.chain.ranges import Ranges


class Weights(Protocol):
    """A whole model's tensors by transformers' names, of which parts can be had; a checkpoint on disk is one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        ...

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
        columns: Ranges | None = None,
    ) -> Tensor:
        """A tensor, or the given rows (dimension 0) and columns (dimension 1) of it."""
        ...

    def rows(self, name: str, ids: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """Rows by id, in the order given: ``(len(ids), *shape(name)[1:])``."""
        ...
