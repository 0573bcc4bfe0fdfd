"""A walk along a chain in one autograd graph, for a device that has whole pieces and so sends no message between them.

The parts of a split model are walked so: the client's from the embedding to the cut, the server's from the cut to the
normed input of the head. Gradients of trained tensors, and of the input where it wants one, come from plain autograd.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from potluck.chain.piece import At, Chain, Link


class Whole(nn.Module):
    """A chain as a module, so that libraries that train modules can train it."""

    def __init__(self, chain: Chain, *, checkpointing: bool = False) -> None:
        """Register the trained tensors; frozen ones are no parameters.

        Args:
            chain: of one rank that holds everything.
            checkpointing: walk each link again in the backward walk instead of keeping its activations.
        """
        super().__init__()
        self._chain = chain
        self._checkpointing = checkpointing
        self.trained = nn.ParameterList([t.local for t in chain.trained])

    def forward(self, x_BSD: Tensor, kept_N: Tensor | None, at: At) -> Tensor:
        """Normed last hidden states ``[N, D]``, or the residual stream where the chain ends before the model does.

        Args:
            x_BSD: the residual stream that comes in; gets a gradient if it wants one.
            kept_N: int64 indices into its ``B * S`` positions; all others are dropped as soon as no position looks at
                another. None keeps all, and gives ``[B, S, D]``.
            at: where in the run this is.
        """
        chain = self._chain
        x, r = x_BSD, None
        for k, link in enumerate(chain.links):
            if kept_N is not None and k == chain.pointwise_from:
                x, r = _kept(x, kept_N), None if r is None else _kept(r, kept_N)
            if self._checkpointing and torch.is_grad_enabled():
                # the masks of dropout follow from ``at``: no state of a generator needs to be kept
                x, r = checkpoint(_walked, link, x, r, at, use_reentrant=False, preserve_rng_state=False)
            else:
                x, r = _walked(link, x, r, at)
        if kept_N is not None and chain.pointwise_from >= len(chain.links):
            x, r = _kept(x, kept_N), None if r is None else _kept(r, kept_N)
        h: Tensor = chain.last(x, r, at)[1]
        return h if kept_N is None else h[0]


def _walked(link: Link, x: Tensor, r: Tensor | None, at: At) -> Any:
    x, h = link.replicated(x, r, at)
    return x, link.sharded(h, at)


def _kept(x_BSD: Tensor, kept_N: Tensor) -> Tensor:
    return x_BSD.flatten(0, 1).index_select(0, kept_N)[None]
