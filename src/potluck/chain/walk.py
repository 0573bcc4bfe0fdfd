"""The forward and the backward walk along a chain, with one or two half-batches in flight.

Autograd never sees a message. Each piece has a graph of its own, detached at its borders, and the backward walk passes
gradients from piece to piece by hand:

- ``r = sum over devices of p``, so the gradient of every device's ``p`` is the gradient of ``r``;
- ``S`` gives each device a partial gradient of ``h``, whose sum over devices is the message of the backward walk;
- ``R`` turns the gradients of its ``(x, h)`` into those of its inputs ``(x, r)``, alike on every device.

A sharded piece of two parts (``TwoPart``) has one more message between them, each way, and is walked in two rounds.

With two halves, each link is walked for one half and then the other, and a half waits for its message only when it
comes to its next link: while one half's message travels, the other half computes.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from potluck.chain.comm import Comm, Message
from potluck.chain.piece import At, Chain, Link, TwoPart
from potluck.chain.visit import (
    Tape,
    Visit,
    again,
    back_through_first,
    back_through_replicated,
    continued,
    gradient_at,
    passed,
    recorded,
    recorded_last,
    run_back,
)


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
        two_part, keeps = _of_two(link, comm), k >= lowest and not checkpointing
        here, sums = [], []
        for j in halves:
            r = arrived(k, j)
            walk = partial(recorded, below=chain.trains_below(k)) if keeps else passed
            visit, xs[j], p = walk(link, xs[j], r, ats[j], two_part)
            here.append(visit)
            sums.append(comm.all_reduce(p, exact=two_part is not None))
        for j, message in enumerate(sums):
            if two_part is not None:
                p = continued(two_part, here[j], message.wait(), ats[j], keeps=keeps)
                message = comm.all_reduce(p)
            messages[j] = message
        if k >= lowest:
            for j in halves:
                visits[j].append(here[j])
    hidden, tapes = [], []
    for j in halves:
        r = arrived(len(chain.links), j)
        last, h = recorded_last(chain, xs[j], r, ats[j], below=chain.trains_below(len(chain.links)))
        hidden.append(h)
        tapes.append(Tape(ats[j], supervised_halves[j], x_halves[j].shape, visits[j], last))
    return hidden, tapes


def backward(chain: Chain, tapes: Sequence[Tape], h_grads: Sequence[Tensor], comm: Comm) -> list[Tensor]:
    """Walk back from the gradients of the last hidden states, adding to ``.grad`` of every trained tensor.

    Gradients of replicated tensors are left as this device has them; see ``pool.gradients`` for their sums.

    Returns:
        Where what the first streams are made of is trained, the gradient ``[B, S, D]`` of each half's, equal on all
        devices; else nothing.
    """
    lowest = chain.lowest_trained
    halves = range(len(tapes))
    x_grads: list[Tensor | None] = [None for _ in halves]
    messages: list[Message | None] = [None for _ in halves]
    above: list[Visit] = [tape.last for tape in tapes]
    for k in reversed(range(lowest, len(chain.links))):
        link = chain.links[k]
        two_part = _of_two(link, comm)
        for j in halves:
            message = messages[j]
            h_grad = message.wait() if message else h_grads[j]
            r_grad, x_grad = back_through_replicated(above[j], x_grads[j], h_grad)
            if k + 1 == chain.pointwise_from:
                r_grad, x_grad = tapes[j].spread(r_grad), tapes[j].spread(x_grad)
            x_grads[j] = x_grad
            visit = tapes[j].visits.pop()
            if visit.contents is not None:
                visit = again(link, visit, tapes[j].at, two_part, below=chain.trains_below(k))
            if visit.p is not None:
                run_back([(visit.p, r_grad)])
            if visit.between is None:
                messages[j] = None if visit.h_in is None else comm.all_reduce(gradient_at(visit.h_in))
            else:
                r_in = visit.between.r_in
                messages[j] = None if r_in is None else comm.all_reduce(gradient_at(r_in), exact=True)
            above[j] = visit
        for j, visit in enumerate(above):
            if visit.between is not None:
                message = messages[j]
                back_through_first(visit.between, None if message is None else message.wait())
                messages[j] = None if visit.h_in is None else comm.all_reduce(gradient_at(visit.h_in))
    for j in halves:
        message = messages[j]
        if lowest == len(chain.links):
            if chain.last_trained:
                back_through_replicated(above[j], None, h_grads[j])
        elif message is not None:
            _, x_grads[j] = back_through_replicated(above[j], x_grads[j], message.wait())
    return [x_grad for x_grad in x_grads if x_grad is not None] if chain.first_trained else []


def _of_two(link: Link, comm: Comm) -> TwoPart | None:
    """The link's sharded piece, if it has two parts and other devices have terms of what is between."""
    return link.sharded if comm.world_size > 1 and isinstance(link.sharded, TwoPart) else None


def _kept(tensor_BSD: Tensor, supervised_N: Tensor) -> Tensor:
    """``[1, N, D]``: these positions alone."""
    return tensor_BSD.flatten(0, 1).index_select(0, supervised_N)[None]
