"""The forward and the backward walk along a chain, with one or two half-batches in flight.

Autograd never sees a message. Each piece has a graph of its own, detached at its borders, and the backward walk passes
gradients from piece to piece by hand:

- ``r = sum over devices of p``, so the gradient of every device's ``p`` is the gradient of ``r``;
- ``S`` gives each device a partial gradient of ``h``, whose sum over devices is the message of the backward walk;
- ``R`` turns the gradients of its ``(x, h)`` into those of its inputs ``(x, r)``, alike on every device.

With two halves, each link is walked for one half and then the other, and a half waits for its message only when it
comes to its next link: while one half's message travels, the other half computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.comm import Comm, Message
from potluck.chain.piece import At, Chain, Link


@dataclass
class Visit:
    """One link as one half walked it: leaves and outputs of the graphs of its two pieces.

    When recomputing, only ``x_in`` and ``r_in`` are kept and the rest is made again in the backward walk.
    """

    x_in: Tensor
    r_in: Tensor | None
    x_out: Tensor | None = None
    h_out: Tensor | None = None
    h_in: Tensor | None = None
    p: Tensor | None = None


@dataclass
class Tape:
    """What the forward walk of one half leaves for its backward walk: a visit a link from the lowest trained one up."""

    at: At
    supervised_N: Tensor
    shape_BSD: torch.Size
    visits: list[Visit]
    last: Visit

    def spread(self, gradient_1ND: Tensor) -> Tensor:
        """``[B, S, D]`` from a gradient of the supervised positions; 0 elsewhere."""
        spread_BSD = gradient_1ND.new_zeros(self.shape_BSD)
        spread_BSD.view(-1, self.shape_BSD[-1])[self.supervised_N] = gradient_1ND[0]
        return spread_BSD


def forward(
    chain: Chain,
    x_halves: Sequence[Tensor],
    supervised_halves: Sequence[Tensor],
    ats: Sequence[At],
    comm: Comm,
    *,
    checkpointing: bool = False,
) -> tuple[list[Tensor], list[Tape]]:
    """Walk the chain with ``x_halves`` (``[B, S, D]`` each) in flight.

    ``supervised_halves`` are int64 indices into each half's ``B * S`` positions: the others are dropped as soon as
    nothing looks at them any more. Returns each half's normed last hidden states ``[1, N, D]`` of these positions
    (detached), and its tape.
    """
    lowest = chain.lowest_trained
    halves = range(len(x_halves))
    xs = [x.detach() for x in x_halves]
    visits: list[list[Visit]] = [[] for _ in halves]
    messages: list[Message | None] = [None for _ in halves]
    for k, link in enumerate(chain.links):
        for j in halves:
            message = messages[j]
            r = message.wait() if message else None
            if k == chain.pointwise_from:
                xs[j] = _kept(xs[j], supervised_halves[j])
                r = None if r is None else _kept(r, supervised_halves[j])
            if k < lowest or checkpointing:
                visit, p, x = _passed(link, xs[j], r, ats[j])
            else:
                visit = _recorded(link, xs[j], r, ats[j], below=k > lowest)
                assert visit.p is not None
                assert visit.x_out is not None
                p, x = visit.p.detach(), visit.x_out.detach()
            if k >= lowest:
                visits[j].append(visit)
            messages[j] = comm.all_reduce(p)
            xs[j] = x
    hidden, tapes = [], []
    for j in halves:
        message = messages[j]
        r = message.wait() if message else None
        if chain.pointwise_from == len(chain.links):
            xs[j] = _kept(xs[j], supervised_halves[j])
            r = None if r is None else _kept(r, supervised_halves[j])
        with torch.set_grad_enabled(lowest < len(chain.links) or bool(chain.last_trained)):
            last = Visit(_leaf(xs[j], lowest < len(chain.links)), _optional_leaf(r, lowest < len(chain.links)))
            _, last.h_out = chain.last(last.x_in, last.r_in, ats[j])
        hidden.append(last.h_out.detach())
        tapes.append(Tape(ats[j], supervised_halves[j], x_halves[j].shape, visits[j], last))
    return hidden, tapes


def backward(chain: Chain, tapes: Sequence[Tape], h_grads: Sequence[Tensor], comm: Comm) -> None:
    """Walk back from the gradients of the last hidden states, adding to ``.grad`` of every trained tensor.

    Gradients of replicated tensors are left as this device has them; see ``pool.gradients`` for their sums.
    """
    lowest = chain.lowest_trained
    halves = range(len(tapes))
    x_grads: list[Tensor | None] = [None for _ in halves]
    messages: list[Message | None] = [None for _ in halves]
    above: list[Visit] = [tape.last for tape in tapes]
    for k in reversed(range(lowest, len(chain.links))):
        link = chain.links[k]
        for j in halves:
            message = messages[j]
            h_grad = message.wait() if message else h_grads[j]
            r_grad, x_grad = _back_through_replicated(above[j], x_grads[j], h_grad)
            if k + 1 == chain.pointwise_from:
                r_grad, x_grad = tapes[j].spread(r_grad), tapes[j].spread(x_grad)
            x_grads[j] = x_grad
            visit = tapes[j].visits[k - lowest]
            if visit.p is None:
                visit = _recorded(link, visit.x_in, visit.r_in, tapes[j].at, below=k > lowest)
            assert visit.p is not None
            assert visit.h_in is not None
            if visit.p.requires_grad:
                torch.autograd.backward(visit.p, r_grad.to(visit.p.dtype))
            visit.p = None
            messages[j] = comm.all_reduce(_gradient(visit.h_in)) if visit.h_in.requires_grad else None
            tapes[j].visits[k - lowest] = above[j] = visit
    for j in halves:
        message = messages[j]
        if lowest == len(chain.links):
            if chain.last_trained:
                _back_through_replicated(above[j], None, h_grads[j])
        elif message is not None:
            _back_through_replicated(above[j], x_grads[j], message.wait())


def _leaf(tensor: Tensor, requires_grad: bool) -> Tensor:
    return tensor.detach().requires_grad_(requires_grad)


def _optional_leaf(tensor: Tensor | None, requires_grad: bool) -> Tensor | None:
    return None if tensor is None else _leaf(tensor, requires_grad)


def _kept(tensor_BSD: Tensor, supervised_N: Tensor) -> Tensor:
    """``[1, N, D]``: these positions alone."""
    return tensor_BSD.flatten(0, 1).index_select(0, supervised_N)[None]


def _passed(link: Link, x: Tensor, r: Tensor | None, at: At) -> tuple[Visit, Tensor, Tensor]:
    with torch.no_grad():
        x_out, h = link.replicated(x, r, at)
        return Visit(x, r), link.sharded(h, at), x_out


def _recorded(link: Link, x: Tensor, r: Tensor | None, at: At, *, below: bool) -> Visit:
    """Walk one link, keeping the graphs; ``below`` says that something is trained under it."""
    with torch.enable_grad():
        visit = Visit(_leaf(x, below), _optional_leaf(r, below))
        visit.x_out, visit.h_out = link.replicated(visit.x_in, visit.r_in, at)
        visit.h_in = _leaf(visit.h_out, below or bool(link.replicated_trained))
        visit.p = link.sharded(visit.h_in, at)
    return visit


def _back_through_replicated(visit: Visit, x_grad: Tensor | None, h_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``(r, x)`` from those of ``(x, h)``; frees the visit."""
    assert visit.h_out is not None
    outputs, gradients = [visit.h_out], [h_grad.to(visit.h_out.dtype)]
    if x_grad is not None and visit.x_out is not None and visit.x_out.requires_grad:
        outputs.append(visit.x_out)
        gradients.append(x_grad)
    torch.autograd.backward(outputs, gradients)
    visit.x_out = visit.h_out = visit.h_in = None
    x_grad_in = _gradient(visit.x_in)
    r_grad_in = x_grad_in if visit.r_in is None else _gradient(visit.r_in)
    return r_grad_in, x_grad_in


def _gradient(leaf: Tensor) -> Tensor:
    gradient = leaf.grad
    return torch.zeros_like(leaf) if gradient is None else gradient
