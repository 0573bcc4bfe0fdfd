"""One link as one half-batch walks it: the graphs of its pieces, detached at their borders."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from potluck.chain.piece import At, Chain, Link, Replicated, TwoPart


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
    between: "Between | None" = None


@dataclass
class Between:
    """The border inside a sharded piece of two parts."""

    own: tuple[Tensor, ...]
    """Of the first part, until the second has read it."""
    p: GradientEdge | None = None
    """Of this device's term."""
    own_out: tuple[GradientEdge | None, ...] = ()
    r_in: Tensor | None = None
    own_in: tuple[Tensor | None, ...] = ()
    summed: Tensor | None = None
    """When recomputing."""


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


def passed(link: Link, x: Tensor, r: Tensor | None, at: At, two_part: TwoPart | None) -> tuple[Visit, Tensor, Tensor]:
    """Walk one link without a graph; returns its visit, the new stream and the partial sum (of the first part)."""
    with torch.no_grad():
        x_out, h = link.replicated(x, r, at)
        if two_part is None:
            return Visit(contents=(x, r)), x_out, link.sharded(h, at)
        p, own = two_part.first(h, at)
        return Visit(contents=(x, r), between=Between(own)), x_out, p


def recorded(
    link: Link, x: Tensor, r: Tensor | None, at: At, two_part: TwoPart | None, *, below: bool
) -> tuple[Visit, Tensor, Tensor]:
    """The same, keeping its graphs; ``below`` says that something is trained under it."""
    with torch.enable_grad():
        visit, x_out, h_out = _entered(link.replicated, x, r, at, below)
        visit.h_in, h = _enter(h_out.detach(), below or bool(link.replicated_trained))
        if two_part is None:
            p = link.sharded(h, at)
            visit.p = _edge(p)
        else:
            p, own = two_part.first(h, at)
            visit.between = Between(own, _edge(p), tuple(_edge(each) for each in own))
    return visit, x_out.detach(), p.detach()


def continued(two_part: TwoPart, visit: Visit, summed: Tensor, at: At, *, keeps: bool) -> Tensor:
    """Walk the second part of a piece, keeping its graph if ``keeps``; returns the partial sum behind it."""
    between = visit.between
    assert between is not None
    own, between.own = between.own, ()
    if not keeps:
        between.summed = summed
        with torch.no_grad():
            return two_part.second(summed, own, at)
    with torch.enable_grad():
        between.r_in, entered = _enter(summed, between.p is not None)
        places = [_enter(each.detach(), edge is not None) for each, edge in zip(own, between.own_out, strict=True)]
        between.own_in = tuple(place for place, _ in places)
        p = two_part.second(entered, tuple(content for _, content in places), at)
    visit.p = _edge(p)
    return p.detach()


def again(link: Link, visit: Visit, at: At, two_part: TwoPart | None, *, below: bool) -> Visit:
    """Walk a link once more from what was kept of it, now keeping its graphs; nothing is sent."""
    assert visit.contents is not None
    once_more, _, _ = recorded(link, *visit.contents, at, two_part, below=below)
    if two_part is not None:
        assert visit.between is not None
        assert visit.between.summed is not None
        continued(two_part, once_more, visit.between.summed, at, keeps=True)
    return once_more


def back_through_first(between: Between, r_grad: Tensor | None) -> None:
    """Run the graph of a piece's first part backward, from the gradients of the sum and of what it kept to itself."""
    own = [(edge, place) for edge, place in zip(between.own_out, between.own_in, strict=True) if edge is not None]
    ends = [(edge, gradient_at(place)) for edge, place in own if place is not None]
    if between.p is not None and r_grad is not None:
        ends.append((between.p, r_grad))
    if ends:
        run_back(ends)


def recorded_last(chain: Chain, x: Tensor, r: Tensor | None, at: At, *, below: bool) -> tuple[Visit, Tensor]:
    """Walk the last piece, keeping its graph; returns the hidden states too."""
    with torch.set_grad_enabled(below or bool(chain.last_trained)):
        visit, _, h_out = _entered(chain.last, x, r, at, below)
    return visit, h_out.detach()


def _entered(piece: Replicated, x: Tensor, r: Tensor | None, at: At, below: bool) -> tuple[Visit, Tensor, Tensor]:
    x_in, x = _enter(x, below)
    r_in, r = (None, None) if r is None else _enter(r, below)
    x_out, h_out = piece(x, r, at)
    return Visit(x_in, r_in, x_out=_edge(x_out), h_out=_edge(h_out)), x_out, h_out


def back_through_replicated(visit: Visit, x_grad: Tensor | None, h_grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``(r, x)`` from those of ``(x, h)``; without meaning where nothing below is trained."""
    edges = [(edge, grad) for edge, grad in ((visit.h_out, h_grad), (visit.x_out, x_grad)) if edge is not None]
    run_back([(edge, grad) for edge, grad in edges if grad is not None])
    x_grad_in = h_grad if visit.x_in is None else gradient_at(visit.x_in)
    return x_grad_in if visit.r_in is None else gradient_at(visit.r_in), x_grad_in


def run_back(ends: Sequence[tuple[GradientEdge, Tensor]]) -> None:
    """Run a piece's graph backward; gradients are brought to the dtypes of its outputs."""
    edges = [edge for edge, _ in ends]
    dtypes = [edge.node._input_metadata[edge.output_nr].dtype for edge in edges]
    gradients = [gradient.to(dtype) for (_, gradient), dtype in zip(ends, dtypes, strict=True)]
    torch.autograd.backward(edges, gradients)


def gradient_at(place: Tensor) -> Tensor:
    """The gradient that came to a place; 0 where none did."""
    return torch.zeros(place.shape, dtype=place.dtype) if place.grad is None else place.grad
