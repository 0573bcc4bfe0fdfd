"""Weight-decomposed low-rank adapters: DoRA (Liu et al., 2024).

Each output's row of the adapted weight gets a trained magnitude::

    y = m / n * (x W^T + s x A^T B^T) + b        n = ||W + s B A||, of each row

``n`` gets no gradient (section 4.3 of the paper), and dropout, where there is some, reaches what is added to the frozen
linear, as in PEFT: with ``x' = dropout(x)`` and ``g = m / n``,

    y = x W^T + b + (g - 1) x' W^T + g s x' A^T B^T

A row cut leaves each device a part of every row of ``W``, and so a part of ``n^2``: only a device that has whole rows
can compute this. A column cut leaves whole rows.

``n`` needs no matrix as large as ``W``. With rows ``w`` of ``W`` and ``b`` of ``B``,

    n^2 = ||w||^2 + 2 s <w, b A> + s^2 ||b A||^2 = ||w||^2 + 2 s <w A^T, b> + s^2 b (A A^T) b^T

where ``||w||^2`` never changes, and ``W A^T`` is ``[out, r]``: as many products as ``r`` more positions walk.

With ``z = x' W^T + s x' A^T B^T`` and the gradient ``dy``, the gradients are ``dm = sum(dy * z) / n`` over positions,
``dz = g dy``, and from ``dz`` those of a plain adapter. Without dropout ``z = y / g`` (``y`` before its bias), so that
``dm = sum(dy * y) / m`` and ``z`` need not be kept; what reads ``y`` keeps it anyway, as a rule.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.chain.low_rank import LoraPart, apart, stacked


def squares(W_OI: Tensor, dtype: torch.dtype) -> Tensor:
    """``[out]``: of each row of a weight the sum of squares, in ``dtype``."""
    norms_O: Tensor = torch.linalg.vector_norm(W_OI, dim=1, dtype=dtype)
    return norms_O.square()


def weighted(
    x_BSI: Tensor, W_OI: Tensor, squares_O: Tensor, scale: float, kept_MI: Tensor | None, parts: Sequence[LoraPart]
) -> Tensor:
    """``[B, S, out]`` of a group of linears without their biases; rows without magnitudes are those of ``W`` alone.

    Args:
        x_BSI: the input.
        W_OI: the frozen weights of the group, whole rows.
        squares_O: what :func:`squares` gave of them.
        scale: ``s``.
        kept_MI: the mask of dropout, scaled; None where nothing is dropped.
        parts: the adapters, all with magnitudes.
    """
    tensors = [tensor for part in parts for tensor in (part.A_RI, part.B_OR, part.m_O)]
    starts = [part.start for part in parts]
    y_BSO: Tensor = _Weighted.apply(  # type: ignore[no-untyped-call]
        x_BSI, W_OI, squares_O, scale, kept_MI, starts, *tensors
    )
    return y_BSO


def row_norms(
    W_OI: Tensor, squares_O: Tensor, scale: float, As: Sequence[Tensor], Bs: Sequence[Tensor], starts: Sequence[int]
) -> Tensor:
    """``n [out]`` in the dtype of ``squares_O``; never zero, so that a row of zeros stays one."""
    exact = squares_O.dtype
    A_RI, B_OR = stacked(As, Bs, starts, W_OI.shape[0], exact)
    along_OR = (W_OI @ A_RI.to(W_OI.dtype).T).to(exact)
    added_OR = B_OR @ (A_RI @ A_RI.T)
    squared_O = squares_O + ((2 * scale * along_OR + scale**2 * added_OR) * B_OR).sum(1)
    return squared_O.clamp_min_(torch.finfo(exact).tiny).sqrt_()


class _Weighted(torch.autograd.Function):
    """See the module's text; gradients for the input, the adapters and the magnitudes."""

    @staticmethod
    def forward(
        ctx: Any,
        x_BSI: Tensor,
        W_OI: Tensor,
        squares_O: Tensor,
        scale: float,
        kept_MI: Tensor | None,
        starts: Sequence[int],
        *tensors: Tensor,
    ) -> Tensor:
        As, Bs, ms = tensors[::3], tensors[1::3], tensors[2::3]
        x_MI = x_BSI.flatten(0, 1)
        A_RI, B_OR = stacked(As, Bs, starts, W_OI.shape[0], x_MI.dtype)
        n_O = row_norms(W_OI, squares_O, scale, As, Bs, starts)
        g_O = torch.ones_like(n_O)
        for m, start in zip(ms, starts, strict=True):
            rows = slice(start, start + len(m))
            g_O[rows] = m / n_O[rows]
        dropped_MI = x_MI if kept_MI is None else x_MI * kept_MI
        u_MR = dropped_MI @ A_RI.T
        z_MO = F.linear(dropped_MI, W_OI).addmm_(u_MR, B_OR.T, alpha=scale)
        y_MO = torch.mul(z_MO, g_O).to(x_MI.dtype)
        if kept_MI is not None:
            y_MO += F.linear(x_MI - dropped_MI, W_OI)
        y_BSO = y_MO.view(*x_BSI.shape[:2], W_OI.shape[0])
        ctx.save_for_backward(dropped_MI, u_MR, W_OI, kept_MI, g_O, n_O, y_BSO if kept_MI is None else z_MO, *tensors)
        ctx.scale, ctx.starts, ctx.shape = scale, starts, x_BSI.shape
        return y_BSO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dropped_MI, u_MR, W_OI, kept_MI, g_O, n_O, out, *tensors = ctx.saved_tensors
        As, Bs, ms = tensors[::3], tensors[1::3], tensors[2::3]
        dy_MO = gradients[0].flatten(0, 1)
        A_RI, B_OR = stacked(As, Bs, ctx.starts, W_OI.shape[0], dy_MO.dtype)
        sums_O = (dy_MO * out.view_as(dy_MO)).sum(0, dtype=n_O.dtype)
        dms = []
        for m, start in zip(ms, ctx.starts, strict=True):
            rows = slice(start, start + len(m))
            # without dropout sums_O are of y = m z / n; a magnitude of zero is that of a row of zeros, and stays
            dm_O = sums_O[rows] / (n_O[rows] if kept_MI is not None else torch.where(m == 0, torch.inf, m))
            dms.append(dm_O.to(m.dtype))
        dz_MO = torch.mul(dy_MO, g_O).to(dy_MO.dtype)
        du_MR = (dz_MO @ B_OR).mul_(ctx.scale)
        dA_RI, dB_OR = du_MR.T @ dropped_MI, (dz_MO.T @ u_MR).mul_(ctx.scale)
        dx_BSI = None
        if ctx.needs_input_grad[0]:
            if kept_MI is None:
                dx_MI = (dz_MO @ W_OI).addmm_(du_MR, A_RI)
            else:
                dx_MI = dy_MO @ W_OI
                dx_MI.addcmul_(((dz_MO - dy_MO) @ W_OI).addmm_(du_MR, A_RI), kept_MI)
            dx_BSI = dx_MI.view(ctx.shape)
        pairs = apart(dA_RI, dB_OR, As, Bs, ctx.starts)
        found = [tensor for (dA, dB), dm in zip(pairs, dms, strict=True) for tensor in (dA, dB, dm)]
        return dx_BSI, None, None, None, None, None, *found
