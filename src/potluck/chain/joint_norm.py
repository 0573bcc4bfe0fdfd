"""Attention whose queries and keys are normed over all heads together, of which each device has some.

A root-mean-square norm needs the sum of squares over all heads: one number a position for queries and one for keys,
summed over devices between the projections and the attention. A key/value head that several devices hold is counted by
its first holder.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.attention import Attention
from potluck.chain.piece import At


@dataclass(frozen=True)
class JointNorm:
    """One of the two norms, as far as this device's heads go."""

    weight_O: Tensor
    """Of the elements held here."""
    counted: Tensor
    """Places of those that this device counts: of what several devices hold, the first one does."""
    width: int
    """Elements of all heads of the model."""
    eps: float

    def squares(self, x_BSO: Tensor) -> Tensor:
        """``[B, S]``: this device's part of the sum of squares."""
        return x_BSO.index_select(-1, self.counted.to(x_BSO.device)).square().sum(-1)

    def __call__(self, x_BSO: Tensor, squares_BS: Tensor) -> Tensor:
        """Normed elements, given the sum of squares over all devices."""
        inverse_BS = (squares_BS / self.width + self.eps).rsqrt()
        return x_BSO * inverse_BS[..., None] * self.weight_O.to(x_BSO.dtype)


@dataclass(frozen=True)
class JointlyNormedAttention:
    """See :class:`potluck.chain.piece.TwoPart`."""

    attention: Attention
    """Without norms of its own."""
    q_norm: JointNorm
    k_norm: JointNorm

    def __call__(self, h_BSD: Tensor, at: At) -> Tensor:
        """``[B, S, D]``, where this device has all heads."""
        return self.second(*self.first(h_BSD, at), at)

    def first(self, h_BSD: Tensor, at: At) -> tuple[Tensor, tuple[Tensor, ...]]:
        """``[B, S, 2]`` parts of the sums of squares of queries and keys; query, key and value ``[B, S, O]``."""
        q_BSO, k_BSO, v_BSO = self.attention.qkv(h_BSD, at).split(self.attention.sizes, -1)
        exact = torch.promote_types(h_BSD.dtype, torch.float32)
        parts = (norm.squares(x.to(exact)) for norm, x in ((self.q_norm, q_BSO), (self.k_norm, k_BSO)))
        return torch.stack(tuple(parts), -1), (q_BSO, k_BSO, v_BSO)

    def second(self, summed: Tensor, own: tuple[Tensor, ...], at: At) -> Tensor:
        """``[B, S, D]``: what these heads add, given ``[B, S, 2]`` sums of squares over all heads."""
        q_BSO, k_BSO, v_BSO = own
        q_sums_BS, k_sums_BS = summed.unbind(-1)
        normed = (self.q_norm(q_BSO.to(summed.dtype), q_sums_BS), self.k_norm(k_BSO.to(summed.dtype), k_sums_BS))
        K = self.attention.head_dim
        q, k, v = (x.to(v_BSO.dtype).unflatten(-1, (x.shape[-1] // K, K)) for x in (*normed, v_BSO))
        return self.attention.attended(q, k, v, at)
