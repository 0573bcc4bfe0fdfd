"""What a chain is made of.

A decoder of L blocks is 2L links and a last replicated piece. A link is a replicated piece ``R``, which every device
computes on whole tensors, and a sharded piece ``S``, which each device computes for its own share::

    x, h = R(x, r)        residual add and the norm before the next sharded piece; r is None at the start
    p    = S(h)           attention or MLP with this device's heads or columns: a partial sum
    r    = all-reduce(p)  the message

Shapes: ``x``, ``r``, ``h``, ``p`` are ``[B, S, D]``, rows of a (half) micro-batch, positions, hidden size.
"""

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from potluck.chain.trained import Trained


@dataclass(frozen=True)
class At:
    """Where in the run a piece is walked. Dropout masks follow from it, so recomputation repeats them."""

    seed: int
    step: int
    micro_batch: int
    half: int
    judging: bool = False
    """What is trained is looked at as it will be used: nothing is dropped."""
    lengths_B: Tensor | None = field(default=None, compare=False, repr=False)
    """Positions of each row that are no padding, for attention both ways; None where all are."""

    def generator(self, *where: str | int) -> torch.Generator:
        """A generator for one dropout: the same on every device that names the same place."""
        key = repr((self.seed, self.step, self.micro_batch, self.half, *where)).encode()
        return torch.Generator().manual_seed(int.from_bytes(blake2b(key, digest_size=8).digest()) >> 1)


class Replicated(Protocol):
    """``R``: the same on every device."""

    def __call__(self, x_BSD: Tensor, r_BSD: Tensor | None, at: At) -> tuple[Tensor, Tensor]:
        """The new residual stream and the normed input of the next sharded piece."""
        ...


class Sharded(Protocol):
    """``S``: this device's share of attention or MLP. An empty share gives zeros."""

    def __call__(self, h_BSD: Tensor, at: At) -> Tensor:
        """This device's term of the sum."""
        ...


@runtime_checkable
class TwoPart(Protocol):
    """An ``S`` whose second part reads a sum over all devices, as a norm over all heads does.

    Called, it is what a device that has everything computes.
    """

    def __call__(self, h_BSD: Tensor, at: At) -> Tensor:
        """This device's term of the sum, where nobody else has one."""
        ...

    def first(self, h_BSD: Tensor, at: At) -> tuple[Tensor, tuple[Tensor, ...]]:
        """This device's term of what the second part reads summed, and what it reads of this device's own."""
        ...

    def second(self, summed: Tensor, own: tuple[Tensor, ...], at: At) -> Tensor:
        """This device's term of the sum behind the piece."""
        ...


@dataclass(frozen=True)
class Link:
    """A replicated piece and the sharded piece it feeds, with the tensors training changes in each."""

    replicated: Replicated
    sharded: Sharded
    replicated_trained: tuple[Trained, ...] = ()
    sharded_trained: tuple[Trained, ...] = ()


@dataclass(frozen=True)
class Chain:
    """A model as this device walks it, from the first residual stream to the normed input of the head."""

    links: tuple[Link, ...]
    last: Replicated
    pointwise_from: int
    """From this link on, no position looks at another (there is no attention any more), so that only supervised
    positions need to be walked; ``len(links)`` where just the last piece is so."""
    last_trained: tuple[Trained, ...] = ()
    first_trained: tuple[Trained, ...] = ()
    """What the stream that comes in is made of: the tables of an embedding that is trained."""

    @property
    def trained(self) -> list[Trained]:
        """All trained tensors, in the order every device has them."""
        inner = [t for link in self.links for t in (*link.replicated_trained, *link.sharded_trained)]
        return [*self.first_trained, *inner, *self.last_trained]

    @property
    def lowest_trained(self) -> int:
        """The first link with a trained tensor: the backward walk ends there; with the first stream, at its start."""
        if self.first_trained:
            return 0
        for k, link in enumerate(self.links):
            if link.replicated_trained or link.sharded_trained:
                return k
        return len(self.links)

    def trains_below(self, k: int) -> bool:
        """Whether something is trained before link ``k``, so that its inputs want gradients."""
        return bool(self.first_trained) or k > self.lowest_trained
