"""Low-rank adapters of linears that share an input, as two matrices."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LoraPart:
    """This device's part of one adapter, and the output rows of its group that it adds to."""

    A_RI: Tensor
    B_OR: Tensor
    start: int
    m_O: Tensor | None = None
    """Magnitudes of these rows, where the adapter has some (:mod:`potluck.chain.dora`)."""


def stacked(
    As: Sequence[Tensor],
    Bs: Sequence[Tensor],
    starts: Sequence[int],
    O: int,  # noqa: E741
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """All ``A`` below each other, ``[R, in]``, and all ``B`` in their rows and columns of ``[out, R]``."""
    if len(As) == 1 and Bs[0].shape[0] == O:
        return As[0].to(dtype), Bs[0].to(dtype)
    B_OR = As[0].new_zeros(O, sum(A.shape[0] for A in As), dtype=dtype)
    column = 0
    for A, B, start in zip(As, Bs, starts, strict=True):
        B_OR[start : start + B.shape[0], column : column + A.shape[0]] = B
        column += A.shape[0]
    return torch.cat([A.to(dtype) for A in As]), B_OR


def apart(
    dA_RI: Tensor, dB_OR: Tensor, As: Sequence[Tensor], Bs: Sequence[Tensor], starts: Sequence[int]
) -> list[tuple[Tensor, Tensor]]:
    """Gradients of stacked matrices as those of each ``A`` and ``B``, in their dtypes: :func:`stacked` undone."""
    found, row = [], 0
    for A, B, start in zip(As, Bs, starts, strict=True):
        rank = A.shape[0]
        dB = dB_OR[start : start + B.shape[0], row : row + rank]
        found.append((dA_RI[row : row + rank].to(A.dtype), dB.to(B.dtype)))
        row += rank
    return found
