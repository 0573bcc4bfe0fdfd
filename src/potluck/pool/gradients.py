"""Gradients of the tensors that several devices hold, and keeping those tensors equal.

Three kinds (``Trained.gradient``): *cut* ones are whole where they are; *equal* ones are the same on every device but
for rounding; *partial* ones are summed over their holders, in one message a step. Devices round differently, so each
tensor that every device has whole gets one *home*, which alone steps it and broadcasts the values; rows of key/value
heads that several devices hold take the values of their first holder. Replicated tensors are then bit-equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.trained import Trained


@dataclass(frozen=True)
class Held:
    """One trained tensor as this rank has it, with the places where others have it too."""

    trained: Trained
    home: int | None
    """For a tensor that every device has whole, the rank that steps it."""
    shared: tuple[int, ...] = ()
    """Indices along ``dim`` that several ranks hold."""
    mine: tuple[tuple[int, int], ...] = ()
    """Of those this rank holds: place in ``shared``, place in ``local``."""
    first: tuple[tuple[int, int], ...] = ()
    """Those of ``mine`` whose first holder is this rank."""
    others: tuple[int, ...] = ()
    """Places in ``local`` of the rest of ``mine``."""


def hold(trained: Sequence[Trained], rank: int, world_size: int) -> list[Held]:
    """Find homes and shared rows; every rank comes to the same homes."""
    load = [0] * world_size
    held = []
    for t in trained:
        if t.dim is None:
            home = load.index(min(load))
            load[home] += t.local.numel()
            held.append(Held(t, home))
            continue
        if t.gradient == "cut":  # nothing is held twice
            held.append(Held(t, None))
            continue
        holders: dict[int, list[int]] = {}
        for r, ranges in enumerate(t.held):
            for index in ranges:
                holders.setdefault(index, []).append(r)
        shared = tuple(sorted(index for index, ranks in holders.items() if len(ranks) > 1))
        place = {index: i for i, index in enumerate(t.held[rank])}
        mine = tuple((i, place[index]) for i, index in enumerate(shared) if index in place)
        first = tuple((i, local) for i, local in mine if holders[shared[i]][0] == rank)
        others = tuple(local for i, local in mine if holders[shared[i]][0] != rank)
        held.append(Held(t, None, shared, mine, first, others))
    return held


def steps_here(held: Sequence[Held], rank: int) -> list[Tensor]:
    """The tensors this rank's optimizer updates."""
    return [h.trained.local for h in held if h.home in (None, rank) and h.trained.local.numel()]


def sum_partial(held: Sequence[Held], comm: Comm) -> None:
    """Sum partial gradients over their holders, in place, with one message."""
    if comm.group is None:
        return
    slots = [_slot(h) for h in held if h.trained.gradient == "partial"]
    if not slots:
        return
    bucket = torch.zeros(sum(slot.numel() for _, slot in slots), dtype=slots[0][1].dtype)
    for (h, slot), part in zip(slots, bucket.split([slot.numel() for _, slot in slots]), strict=True):
        gradient = _gradient(h.trained)
        if h.trained.dim is None:
            part.copy_(gradient.flatten())
        elif h.mine:
            target = part.view_as(slot)
            target[[i for i, _ in h.mine]] = gradient.movedim(h.trained.dim, 0)[[local for _, local in h.mine]]
    bucket = comm.all_reduce(bucket, exact=True).wait()
    for (h, slot), part in zip(slots, bucket.split([slot.numel() for _, slot in slots]), strict=True):
        gradient = _gradient(h.trained)
        if h.trained.dim is None:
            gradient.copy_(part.view_as(gradient))
        elif h.mine:
            values = part.view_as(slot)[[i for i, _ in h.mine]]
            gradient.movedim(h.trained.dim, 0)[[local for _, local in h.mine]] = values


def squared_norm(held: Sequence[Held], rank: int) -> Tensor:
    """This rank's term of the squared gradient norm, float64: every element of the model is counted by one rank."""
    counted = [h for h in held if h.home in (None, rank) and h.trained.local.numel()]
    if not counted:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm([_gradient(h.trained) for h in counted])
    total = torch.stack(norms).double().square().sum()
    for h in counted:
        gradient = _gradient(h.trained)
        if h.others and h.trained.dim is not None:
            total -= gradient.movedim(h.trained.dim, 0)[list(h.others)].double().pow(2).sum()
    return total


def spread_shared(held: Sequence[Held], comm: Comm) -> None:
    """Give every holder of a shared row the values of its first holder."""
    if comm.group is None:
        return
    shared = [_slot(h) for h in held if h.shared]
    if not shared:
        return
    # One holder fills each place and the others leave zero, so the sum is exactly that holder's value.
    bucket = torch.zeros(sum(slot.numel() for _, slot in shared), dtype=shared[0][1].dtype)
    for (h, slot), part in zip(shared, bucket.split([slot.numel() for _, slot in shared]), strict=True):
        if h.first and h.trained.dim is not None:
            values = h.trained.local.detach().movedim(h.trained.dim, 0)
            part.view_as(slot)[[i for i, _ in h.first]] = values[[local for _, local in h.first]]
    bucket = comm.all_reduce(bucket, exact=True).wait()
    for (h, slot), part in zip(shared, bucket.split([slot.numel() for _, slot in shared]), strict=True):
        if h.mine and h.trained.dim is not None:
            values = h.trained.local.detach().movedim(h.trained.dim, 0)
            values[[local for _, local in h.mine]] = part.view_as(slot)[[i for i, _ in h.mine]]


def unequal(held: Sequence[Held], comm: Comm) -> Iterator[str]:
    """Names of replicated tensors that are not bit-equal on all devices: none, or a defect."""
    for h in held:
        if h.home is not None:
            everywhere = comm.all_gather(h.trained.local.detach()).wait()
            if not all(torch.equal(everywhere[0], other) for other in everywhere[1:]):
                yield h.trained.name


def _slot(h: Held) -> tuple[Held, Tensor]:
    """The tensor with the shape of what is exchanged for ``h``, without memory."""
    local, dim = h.trained.local, h.trained.dim
    if dim is None:
        return h, local.detach().to("meta")
    rest = [n for d, n in enumerate(local.shape) if d != dim]
    return h, torch.empty(len(h.shared), *rest, dtype=local.dtype, device="meta")


def _gradient(trained: Trained) -> Tensor:
    if trained.local.grad is None:
        trained.local.grad = torch.zeros_like(trained.local)
    return trained.local.grad
