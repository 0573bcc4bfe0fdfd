"""The replicated piece: residual add and the next norm."""

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.chain.piece import At


@dataclass(frozen=True)
class Norm:
    """Root-mean-square norm (Zhang and Sennrich, 2019) over the last dimension, in float32 or better.

    ``offset`` is added to the weight: 1 in families that store the distance from one.
    """

    weight_D: Tensor
    eps: float
    offset: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Normed ``x`` in float32, or float64 if ``x`` is."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        weight_D: Tensor = self.weight_D.to(x.dtype)
        normed: Tensor = _RmsNorm.apply(  # type: ignore[no-untyped-call]
            x, weight_D + self.offset if self.offset else weight_D, self.eps
        )
        return normed


class _RmsNorm(torch.autograd.Function):
    """``y = w x / rms(x)``, with ``dx = i (w g - x i^2 mean(w g x))`` where ``i = 1 / rms(x)``, and ``dw = g x i``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        inverse: Tensor = (
            torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        )
        ctx.save_for_backward(x, weight_D, inverse)
        return (x * inverse).mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight_D, inverse = ctx.saved_tensors
        g = gradients[0]
        dweight_D = (g * x).mul_(inverse).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        if not ctx.needs_input_grad[0]:
            return None, dweight_D, None
        weighted = g * weight_D
        along = torch.linalg.vecdot(weighted, x)[..., None].mul_(inverse.pow(3)).div_(x.shape[-1])
        return weighted.mul_(inverse).addcmul_(x, along, value=-1), dweight_D, None


@dataclass(frozen=True)
class LayerNorm:
    """Norm with mean and variance (Ba et al., 2016) over the last dimension, in float32 or better."""

    weight_D: Tensor
    bias_D: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Normed ``x`` in float32, or float64 if ``x`` is."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        bias_D = None if self.bias_D is None else self.bias_D.to(x.dtype)
        return F.layer_norm(x, self.weight_D.shape, self.weight_D.to(x.dtype), bias_D, self.eps)


AnyNorm: TypeAlias = Norm | LayerNorm


@dataclass(frozen=True)
class AddNorm:
    """A replicated piece: add the reduced sum to the residual stream, norm it for the next sharded piece.

    The stream ``x`` stays in float32 (or float64), the norm's output ``h`` is in the compute dtype.
    """

    norm: AnyNorm | None
    """None in families that have none here, and at the end of a part of a model."""
    compute: torch.dtype | None
    """Dtype of ``h``; None at the end of a part of a model, where the stream itself goes on to the next part."""
    bias_D: Tensor | None = None
    """Bias of the row-cut linear whose partial sums were just reduced."""
    norm_of_sum: AnyNorm | None = None
    """Norm of the reduced sum before it is added, in families that have one."""
    scale: float = 1.0
    """What the reduced sum is multiplied by before it is added."""
    before_sum: bool = False
    """Whether ``h`` is of the stream before the sum is added: the next piece reads what the one before has read."""
    h_scale: float = 1.0
    """What ``h`` is multiplied by: behind the last norm, logits are linear in it."""
    norm_of_stream: AnyNorm | None = None
    """Norm of the stream after the sum is added, in families whose stream is what has been normed."""

    def __call__(self, x_BSD: Tensor, r_BSD: Tensor | None, at: At) -> tuple[Tensor, Tensor]:
        """The new stream and ``h``, both ``[B, S, D]``."""
        read_BSD = x_BSD
        if r_BSD is not None:
            if self.bias_D is not None:
                r_BSD = r_BSD + self.bias_D.to(r_BSD.dtype)
            if self.norm_of_sum is not None:
                r_BSD = self.norm_of_sum(r_BSD)
            x_BSD = x_BSD + (r_BSD if self.scale == 1.0 else r_BSD * self.scale)
        if self.norm_of_stream is not None:
            x_BSD = self.norm_of_stream(x_BSD)
        if not self.before_sum:
            read_BSD = x_BSD
        h_BSD = read_BSD if self.norm is None else self.norm(read_BSD)
        if self.h_scale != 1.0:
            h_BSD = h_BSD * self.h_scale
        return x_BSD, h_BSD if self.compute is None else h_BSD.to(self.compute)
