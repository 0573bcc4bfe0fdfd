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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from potluck.chain.comm import Comm, Message
from potluck.chain.piece import At, Chain, Link, Replicated


@dataclass
class Visit:
    """One link as one half walked it: the ends of the graphs of its two pieces.

    Inputs are places that take a gradient, outputs are edges of a graph: neither keeps a tensor in memory that no
    piece has kept for its own backward. When recomputing, only the contents of ``x`` and ``r`` are kept, and the rest
    is made again in the backward walk.
    """

    x_in: Tensor | None = None
    r_in: Tensor | None = None
    h_in: Tensor | None = None
    x_out: GradientEdge | None = None
    h_out: GradientEdge | None = None
    p: GradientEdge | None = None
    contents: tuple[Tensor, Tensor | None] | None = None


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

    def arrived(k: int, j: int) -> Tensor | None:
        message = messages[j]
        r = message.wait() if message else None
        if k == chain.pointwise_from:
            xs[j] = _kept(xs[j], supervised_halves[j])
            r = None if r is None else _kept(r, supervised_halves[j])
        return r

    for k, link in enumerate(chain.links):
        for j in halves:
            r = arrived(k, j)
            if k < lowest or checkpointing:
                visit, x, p = _passed(link, xs[j], r, ats[j])
            else:
                visit, x, p = _recorded(link, xs[j], r, ats[j], below=k > lowest)
            if k >= lowest:
                visits[j].append(visit)
            messages[j] = comm.all_reduce(p)
            xs[j] = x
    hidden, tapes = [], []
    for j in halves:
        r = arrived(len(chain.links), j)
        last, h = _recorded_last(chain, xs[j], r, ats[j], below=lowest < len(chain.links))
        hidden.append(h)
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
            visit = tapes[j].visits.pop()
            if visit.contents is not None:
                visit, _, _ = _recorded(link, *visit.contents, tapes[j].at, below=k > lowest)
            if visit.p is not None:
                _run_back([(visit.p, r_grad)])
            messages[j] = None if visit.h_in is None else comm.all_reduce(_gradient(visit.h_in))
            above[j] = visit
    for j in halves:
        message = messages[j]
        if lowest == len(chain.links):
            if chain.last_trained:
                _back_through_replicated(above[j], None, h_grads[j])
        elif message is not None:
            _back_through_replicated(above[j], x_grads[j], message.wait())


def _kept(tensor_BSD: Tensor, supervised_N: Tensor) -> Tensor:
    """``[1, N, D]``: these positions alone."""
    return tensor_BSD.flatten(0, 1).index_select(0, supervised_N)[None]


class _Enter(torch.autograd.Function):
    """Lets a tensor into a graph by way of a place that takes its gradient, without keeping the tensor."""

    @staticmethod
    def forward(ctx: Any, place: Tensor, content: Tensor) -> Tensor:
        return content.view_as(content)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _enter(content: Tensor, wanted: bool) -> tuple[Tensor | None, Tensor]:
    """A place for the gradient of ``content`` if it is ``wanted``, and ``content`` as the graph's input."""
    if not wanted:
        return None, content
    place = content.new_zeros(()).expand(content.shape).requires_grad_()
    entered: Tensor = _Enter.apply(place, content)  # type: ignore[no-untyped-call]
    return place, entered


def _edge(output: Tensor) -> GradientEdge | None:
    return get_gradient_edge(output) if output.requires_grad else None


def _passed(link: Link, x: Tensor, r: Tensor | None, at: At) -> tuple[Visit, Tensor, Tensor]:
    """Walk one link without a graph; returns its visit, the new stream and the partial sum."""
    with torch.no_grad():
        x_out, h = link.replicated(x, r, at)
        return Visit(contents=(x, r)), x_out, link.sharded(h, at)


def _recorded(link: Link, x: Tensor, r: Tensor | None, at: At, *, below: bool) -> tuple[Visit, Tensor, Tensor]:
    """Walk one link, keeping its graphs; ``below`` says that something is trained under it."""
    with torch.enable_grad():
        visit, x_out, h_out = _entered(link.replicated, x, r, at, below)
        visit.h_in, h = _enter(h_out.detach(), below or bool(link.replicated_trained))
        p = link.sharded(h, at)
    visit.p = _edge(p)
    return visit, x_out.detach(), p.detach()


def _recorded_last(chain: Chain, x: Tensor, r: Tensor | None, at: At, *, below: bool) -> tuple[Visit, Tensor]:
    """Walk the last piece, keeping its graph; returns the hidden states too."""
    with torch.set_grad_enabled(below or bool(chain.last_trained)):
        visit, _, h_out = _entered(chain.last, x, r, at, below)
    return visit, h_out.detach()


def _entered(piece: Replicated, x: Tensor, r: Tensor | None, at: At, below: bool) -> tuple[Visit, Tensor, Tensor]:
    x_in, x = _enter(x, below)
    r_in, r = (None, None) if r is None else _enter(r, below)
    x_out, h_out = piece(x, r, at)
    return Visit(x_in, r_in, x_out=_edge(x_out), h_out=_edge(h_out)), x_out, h_out


def _back_through_replicated(visit: Visit, x_grad: Tensor | None, h_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``(r, x)`` from those of ``(x, h)``; without meaning where nothing below is trained."""
    edges = [(edge, grad) for edge, grad in ((visit.h_out, h_grad), (visit.x_out, x_grad)) if edge is not None]
    _run_back([(edge, grad) for edge, grad in edges if grad is not None])
    x_grad_in = h_grad if visit.x_in is None else _gradient(visit.x_in)
    return x_grad_in if visit.r_in is None else _gradient(visit.r_in), x_grad_in


def _run_back(ends: Sequence[tuple[GradientEdge, Tensor]]) -> None:
    """Run a piece's graph backward; gradients are brought to the dtypes of its outputs."""
    edges = [edge for edge, _ in ends]
    dtypes = [edge.node._input_metadata[edge.output_nr].dtype for edge in edges]
    gradients = [gradient.to(dtype) for (_, gradient), dtype in zip(ends, dtypes, strict=True)]
    torch.autograd.backward(edges, gradients)


def _gradient(place: Tensor) -> Tensor:
    return torch.zeros(place.shape, dtype=place.dtype) if place.grad is None else place.grad
