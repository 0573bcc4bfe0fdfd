"""Linears whose inputs or outputs are scaled by a trained vector: (IA)^3 (Liu et al., 2022).

A column-cut linear is scaled on its output, its bias included, ``y = l * (x W^T + b)``: ``l [out]`` is cut like the
rows of ``W``. A row-cut one is scaled on its input, ``y = (l * x) W^T``: ``l [in]`` is cut like the columns of ``W``,
and the bias, which is added after the sum, is not scaled. So each device needs no more than its own part of ``l``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def scaled(x: Tensor, l_F: Tensor) -> Tensor:
    """``x * l`` along the last dimension, rounded once, to the dtype of ``x``: ``l`` hardly differs from one."""
    y: Tensor = _Scaled.apply(x, l_F)  # type: ignore[no-untyped-call]
    return y


def side_by_side(vectors: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
    """The vectors of several linears over one input as one; ones where a linear has none."""
    some = next(vector for vector in vectors if vector is not None)
    parts = [some.new_ones(size) if v is None else v for v, size in zip(vectors, sizes, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Scaled(torch.autograd.Function):
    """A product that keeps its input in the dtype it came in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, l_F: Tensor) -> Tensor:
        ctx.save_for_backward(x, l_F)
        return torch.mul(x, l_F).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, l_F = ctx.saved_tensors
        (g,) = gradients
        dx = torch.mul(g, l_F).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, (g * x).flatten(0, -2).sum(0, dtype=l_F.dtype)
