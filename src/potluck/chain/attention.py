"""Attention over any subset of query heads, with an explicit map from query heads to key/value heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from potluck.chain.linear import CutLinears
from potluck.chain.piece import At
from potluck.chain.residual import AnyNorm

Rope = Callable[[int, torch.dtype], tuple[Tensor, Tensor]]
"""Number of positions and dtype to ``cos [S, K]`` and ``sin [S, K]``."""


def attend(
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    kv_of_q_H: Tensor | None,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = True,
    softcap: float | None = None,
) -> Tensor:
    """Scaled dot-product attention in which query head ``i`` reads key/value head ``kv_of_q_H[i]``.

    ``kv_of_q_H`` None means ``i`` reads ``i``. A ``mask`` (broadcast to ``[B, H, S, S]``) is True or 0 where attention
    is allowed; without one, positions see those before them if ``causal``, else all. ``softcap`` bounds scores by
    ``c tanh(score / c)``. Returns ``[B, H, S, K]``; ``H`` may be 0.
    """
    if kv_of_q_H is not None:
        kv_of_q_H = kv_of_q_H.to(k_BGSK.device)
        k_BGSK, v_BGSK = k_BGSK.index_select(1, kv_of_q_H), v_BGSK.index_select(1, kv_of_q_H)
    # torch's bfloat16 kernel takes up to seven times as long as its float32 one on short rows.
    exact = torch.promote_types(q_BHSK.dtype, torch.float32)
    causal = causal and mask is None and q_BHSK.shape[2] > 1
    q, k, v = q_BHSK.to(exact), k_BGSK.to(exact), v_BGSK.to(exact)
    if softcap is not None:
        return _capped(q, k, v, scale, mask, softcap, causal).to(q_BHSK.dtype)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale).to(q_BHSK.dtype)


def _capped(
    q_BHSK: Tensor, k_BHSK: Tensor, v_BHSK: Tensor, scale: float, mask: Tensor | None, softcap: float, causal: bool
) -> Tensor:
    scores_BHSS = torch.tanh(q_BHSK @ k_BHSK.transpose(-1, -2) * (scale / softcap)) * softcap
    if mask is None and causal:
        mask = scores_BHSS.new_ones(scores_BHSS.shape[-2:], dtype=torch.bool).tril_()
    if mask is None:
        return scores_BHSS.softmax(-1) @ v_BHSK
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q_BHSK.dtype).masked_fill_(~mask, -torch.inf)
    return (scores_BHSS + mask).softmax(-1) @ v_BHSK


def kv_heads(heads: list[int], group: int) -> tuple[list[int], Tensor | None]:
    """The key/value heads that the given query heads read, and the local map between them.

    ``group`` is the number of query heads that share one key/value head in the whole model. The map is None where it
    is the identity.
    """
    needed = sorted({h // group for h in heads})
    local = [needed.index(h // group) for h in heads]
    return needed, None if local == list(range(len(needed))) else torch.tensor(local, dtype=torch.long)


def register_with_transformers() -> str:
    """Offer :func:`attend` to stock transformers models as ``attn_implementation="potluck"``; returns that name."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    AttentionInterface.register("potluck", _attend_for_transformers)
    AttentionMaskInterface.register("potluck", sdpa_mask)
    return "potluck"


def _attend_for_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **unused: Any,
) -> tuple[Tensor, None]:
    _, kv_of_q_H = kv_heads(list(range(query.shape[1])), query.shape[1] // key.shape[1])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    y_BHSK = attend(query, key, value, kv_of_q_H, scale=scale, mask=attention_mask)
    return y_BHSK.transpose(1, 2).contiguous(), None


class _Rotate(torch.autograd.Function):
    """A rotation; its backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x_BSHK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SK, sin_SK)
        return _rotated(x_BSHK, cos_SK, sin_SK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        cos_SK, sin_SK = ctx.saved_tensors
        return _rotated(gradients[0], cos_SK, -sin_SK), None, None


def _rotated(x_BSHK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    half = x_BSHK.shape[-1] // 2
    a, b = x_BSHK[..., :half], x_BSHK[..., half:]
    cos, sin = cos_SK[:, None, :half], sin_SK[:, None, :half]
    turned = torch.empty_like(x_BSHK)
    torch.mul(a, cos, out=turned[..., :half]).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=turned[..., half:]).addcmul_(a, sin)
    return turned


def rotate(x_BSHK: Tensor, cos_SK: Tensor, sin_SK: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) in the half-split layout: both halves have the same angles.

    Where the tables are narrower than a head, its first part is turned.
    """
    width = cos_SK.shape[-1]
    turned: Tensor = _Rotate.apply(x_BSHK[..., :width], cos_SK, sin_SK)  # type: ignore[no-untyped-call]
    return turned if width == x_BSHK.shape[-1] else torch.cat((turned, x_BSHK[..., width:]), -1)


@dataclass(frozen=True)
class Attention:
    """A sharded piece: self-attention of this device's query heads."""

    qkv: CutLinears
    o: CutLinears
    sizes: tuple[int, int, int]
    """Elements of query, key and value of one position."""
    head_dim: int
    scale: float
    rope: Rope | None
    kv_of_q_H: Tensor | None
    q_norm: AnyNorm | None = None
    k_norm: AnyNorm | None = None
    window: int | None = None
    """How many positions back a token sees, itself included; None for all."""
    softcap: float | None = None
    by_head: bool = False
    """Whether ``qkv`` gives query, key and value of one head after the other."""
    bidirectional: bool = False
    """Whether positions see those behind them too."""

    def __call__(self, h_BSD: Tensor, at: At) -> Tensor:
        """``[B, S, D]``: the partial sum of these heads' outputs."""
        q_BSHK, k_BSGK, v_BSGK = self.heads(self.qkv(h_BSD, at))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHK, k_BSGK = self.q_norm(q_BSHK).to(h_BSD.dtype), self.k_norm(k_BSGK).to(h_BSD.dtype)
        return self.attended(q_BSHK, k_BSGK, v_BSGK, at)

    def attended(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGK: Tensor, at: At) -> Tensor:
        """``[B, S, D]``: what these heads add, from queries, keys and values not yet turned."""
        B, S, H, K = q_BSHK.shape
        if self.rope is not None:
            cos_SK, sin_SK = (table.to(q_BSHK.device) for table in self.rope(S, q_BSHK.dtype))
            q_BSHK, k_BSGK = rotate(q_BSHK, cos_SK, sin_SK), rotate(k_BSGK, cos_SK, sin_SK)
        y_BHSK = attend(
            q_BSHK.transpose(1, 2),
            k_BSGK.transpose(1, 2),
            v_BSGK.transpose(1, 2),
            self.kv_of_q_H,
            scale=self.scale,
            mask=self._mask(S, at, q_BSHK.device),
            causal=not self.bidirectional,
            softcap=self.softcap,
        )
        return self.o(y_BHSK.transpose(1, 2).reshape(B, S, H * K), at)

    def heads(self, y_BSO: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query ``[B, S, H, K]``, key and value ``[B, S, G, K]``."""
        B, S, O = y_BSO.shape  # noqa: E741
        K = self.head_dim
        if self.by_head:
            q_BSHK, k_BSHK, v_BSHK = y_BSO.view(B, S, O // (3 * K), 3, K).unbind(-2)
            return q_BSHK, k_BSHK, v_BSHK
        q, k, v = (y.view(B, S, size // K, K) for y, size in zip(y_BSO.split(self.sizes, -1), self.sizes, strict=True))
        return q, k, v

    def _mask(self, S: int, at: At, device: torch.device) -> Tensor | None:
        """Rows are padded on the right, so causality alone hides the padding, and only a short window needs a mask.

        Both ways, no position may see padding.
        """
        if self.bidirectional:
            if at.lengths_B is None or bool((at.lengths_B == S).all()):
                return None
            return (torch.arange(S, device=device) < at.lengths_B.to(device)[:, None])[:, None, None]
        if self.window is None or self.window >= S:
            return None
        at_S = torch.arange(S, device=device)
        back_SS = at_S[:, None] - at_S
        return (back_SS >= 0) & (back_SS < self.window)
