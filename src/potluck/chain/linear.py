"""Cut linears that share an input, with their low-rank adapters.

A *column* cut holds some rows of ``W [out, in]``: whole inputs, some outputs. A *row* cut holds some columns: some
inputs, a partial sum of the outputs; its bias is added once, after the sum, by the next replicated piece.

With LoRA, ``y = x W^T + (alpha / r) dropout(x) A^T B^T`` with ``A [r, in]`` and ``B [out, r]`` (Hu et al., 2021).
Under a column cut ``B`` is cut like ``W`` and ``A`` is whole; under a row cut ``A`` is cut and ``B`` whole. The whole
one gets a partial gradient on each device. With DoRA each row of the adapted weight has a magnitude too
(:mod:`potluck.chain.dora`), and with (IA)^3 a vector scales outputs or inputs (:mod:`potluck.chain.vectors`).

Query, key and value read the same input, and so do gate and up: their frozen weights lie in one tensor, their ``A`` are
stacked and their ``B`` set along a diagonal, so that a group costs as many matrix products as one linear.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.chain.dora import weighted
from potluck.chain.low_rank import LoraPart, apart, stacked
from potluck.chain.piece import At
from potluck.chain.vectors import scaled, side_by_side


@dataclass(frozen=True)
class CutLinears:
    """This device's parts of one or several linears over the same input."""

    name: str
    """Of the first linear; keys the dropout."""
    weights_OI: tuple[Tensor, ...]
    """One tensor with the rows of all linears if they are frozen, else one a linear."""
    biases_O: tuple[Tensor | None, ...]
    """As ``weights_OI``; only under a column cut."""
    sizes: tuple[int, ...]
    """Output rows of each linear."""
    adapters: tuple[LoraPart, ...] = ()
    scale: float = 1.0
    dropout: float = 0.0
    cut_input_of: int | None = None
    """The rank whose columns these are under a row cut; None where every device has the same whole input."""
    squares_O: Tensor | None = None
    """With DoRA, of each row of the weight the sum of squares."""
    vectors: tuple[Tensor | None, ...] = ()
    """With (IA)^3, what scales each linear's outputs, or the one's inputs under a row cut; empty without."""

    def __call__(self, x_BSI: Tensor, at: At) -> Tensor:
        """``[B, S, sum(sizes)]`` in the dtype of ``x``: each linear's outputs here side by side, or partial sums."""
        if not self.adapters:
            return self._scaled(x_BSI) if self.vectors else self._plain(x_BSI)
        (weight,), (bias,) = self.weights_OI, self.biases_O
        kept_MI = self._kept(x_BSI, at)
        if self.squares_O is not None:
            z_BSO = weighted(x_BSI, weight, self.squares_O, self.scale, kept_MI, self.adapters)
            return z_BSO if bias is None else z_BSO + bias.to(z_BSO.dtype)
        tensors = [tensor for part in self.adapters for tensor in (part.A_RI, part.B_OR)]
        starts = [part.start for part in self.adapters]
        y_BSO: Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
            x_BSI, weight, bias, self.scale, kept_MI, starts, *tensors
        )
        return y_BSO

    def _plain(self, x_BSI: Tensor) -> Tensor:
        parts = zip(self.weights_OI, self.biases_O, strict=True)
        outputs = [_linear(x_BSI, weight, bias) for weight, bias in parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)

    def _scaled(self, x_BSI: Tensor) -> Tensor:
        if self.cut_input_of is None:
            return scaled(self._plain(x_BSI), side_by_side(self.vectors, self.sizes))
        return self._plain(scaled(x_BSI, side_by_side(self.vectors, [x_BSI.shape[-1]])))

    def _kept(self, x_BSI: Tensor, at: At) -> Tensor | None:
        """The dropout mask, scaled to keep the expected value; None where nothing is dropped."""
        if self.dropout == 0.0 or at.judging:
            return None
        place = (self.name,) if self.cut_input_of is None else (self.name, self.cut_input_of)
        kept = torch.empty(x_BSI.shape).bernoulli_(1 - self.dropout, generator=at.generator(*place))
        return kept.div_(1 - self.dropout).to(x_BSI.device, x_BSI.dtype).flatten(0, 1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class _AdaptedLinear(torch.autograd.Function):
    """A frozen linear plus adapters; gradients for the input and the adapters.

    With ``u = dropout(x) A^T`` and the gradient ``g`` of ``y``: ``dB = s g^T u``, ``du = s g B``, ``dA = du^T x`` and
    ``dx = g W + du A``, the last accumulated in one matrix product.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_BSI: Tensor,
        W_OI: Tensor,
        bias_O: Tensor | None,
        scale: float,
        kept_MI: Tensor | None,
        starts: Sequence[int],
        *adapters: Tensor,
    ) -> Tensor:
        x_MI = x_BSI.flatten(0, 1)
        A_RI, B_OR = stacked(adapters[::2], adapters[1::2], starts, W_OI.shape[0], x_MI.dtype)
        dropped_MI = x_MI if kept_MI is None else x_MI * kept_MI
        u_MR = dropped_MI @ A_RI.T
        y_MO = F.linear(x_MI, W_OI, None if bias_O is None else bias_O.to(x_MI.dtype))
        y_MO.addmm_(u_MR, B_OR.T, alpha=scale)
        ctx.save_for_backward(dropped_MI, u_MR, W_OI, kept_MI, *adapters)
        ctx.scale, ctx.starts, ctx.shape = scale, starts, x_BSI.shape
        return y_MO.view(*x_BSI.shape[:2], W_OI.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dropped_MI, u_MR, W_OI, kept_MI, *adapters = ctx.saved_tensors
        g_MO = gradients[0].flatten(0, 1)
        As, Bs = adapters[::2], adapters[1::2]
        A_RI, B_OR = stacked(As, Bs, ctx.starts, W_OI.shape[0], g_MO.dtype)
        du_MR = (g_MO @ B_OR).mul_(ctx.scale)
        dA_RI, dB_OR = du_MR.T @ dropped_MI, (g_MO.T @ u_MR).mul_(ctx.scale)
        found = [tensor for pair in apart(dA_RI, dB_OR, As, Bs, ctx.starts) for tensor in pair]
        dx_BSI = None
        if ctx.needs_input_grad[0]:
            dx_MI = g_MO @ W_OI
            if kept_MI is None:
                dx_MI.addmm_(du_MR, A_RI)
            else:
                dx_MI.addcmul_(du_MR @ A_RI, kept_MI)
            dx_BSI = dx_MI.view(ctx.shape)
        return dx_BSI, None, None, None, None, None, *found
