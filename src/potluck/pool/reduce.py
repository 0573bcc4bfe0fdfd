"""Between all devices and the homes of replicated tensors: gradients are summed there, values come back from there.

A gradient is needed at its tensor's home alone, which steps the tensor and gives everyone its values. So each device
sends it there directly: ``(n - 1) / n`` of all gradients instead of the ``2 (n - 1) / n`` of an all-reduce. The home
adds what comes in the order of ranks. Values leave all homes at the same time, so that no link is idle meanwhile. Both
ways, chunks bound what is on its way.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.pool.gradients import Held

CHUNK_BYTES = 4 << 20
"""On their way to or from one home at once."""
_GRADIENTS_TAG, _VALUES_TAG = 12, 13
_CHUNKS_IN_FLIGHT = 2

_Chunk = Sequence[list[Tensor]]
"""Of each home some parts of tensors, flat and in place."""


def reduce_to_homes(
    held: Sequence[Held], walkers: Sequence[int], comm: Comm, *, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """Sum gradients at each tensor's home, in place and in their own dtype; elsewhere they are let go.

    Args:
        held: tensors that every device has whole, all of one dtype.
        walkers: ranks that have gradients, ascending; the others send nothing.
        comm: the messages.
        chunk_bytes: of one home's gradients, sent at once; two chunks a home are on their way.

    Raises:
        DeviceLost: another device ended.
    """
    rank = comm.rank
    for h in held:
        if h.trained.local.grad is None and (h.home == rank or rank in walkers):
            h.trained.local.grad = torch.zeros_like(h.trained.local)
    if comm.group is None:
        return
    awaited_s = comm.clocks.awaited_s
    # a device without gradients has the tensors themselves in their places, whose sizes alone it needs
    gradients = [h.trained.local.detach() if h.trained.local.grad is None else h.trained.local.grad for h in held]
    _exchange(_chunks(held, gradients, comm, chunk_bytes), lambda chunk: _Summed(chunk, walkers, comm))
    for h in held:
        if h.home != rank:
            h.trained.local.grad = None
    # all devices take part at the same point, so clocks read it as one message of theirs
    comm.clocks.blocked_s.append(comm.clocks.awaited_s - awaited_s)
    comm.clocks.awaited_s = awaited_s


def spread_from_homes(held: Sequence[Held], comm: Comm, *, chunk_bytes: int = CHUNK_BYTES) -> None:
    """Give every device the values of each replicated tensor's home, in place.

    Args:
        held: this device's trained tensors; those without a home are left as they are.
        comm: the messages.
        chunk_bytes: of one home's values, sent at once; two chunks a home are on their way.

    Raises:
        DeviceLost: another device ended.
    """
    if comm.group is None:
        return
    whole = [h for h in held if h.home is not None]
    values = [h.trained.local.detach() for h in whole]
    _exchange(_chunks(whole, values, comm, chunk_bytes), lambda chunk: _Spread(chunk, comm))


def pass_from_homes(
    held: Sequence[Held], holders: Sequence[int], comm: Comm, *, chunk_bytes: int = CHUNK_BYTES
) -> None:
    """As :func:`spread_from_homes`, where some devices have these tensors, and ``held`` is empty on the others.

    Args:
        held: tensors that every one of the ``holders`` has whole, their homes among them.
        holders: ranks.
        comm: the messages, straight from homes to holders.
        chunk_bytes: of one home's values, sent at once; two chunks a home are on their way.

    Raises:
        DeviceLost: another device ended.
    """
    if comm.group is None:
        return
    values = [h.trained.local.detach() for h in held]
    _exchange(_chunks(held, values, comm, chunk_bytes), lambda chunk: _Passed(chunk, holders, comm))


class _Exchanged(Protocol):
    def finish(self) -> None: ...


def _exchange(chunks: Iterator[_Chunk], start: Callable[[_Chunk], _Exchanged]) -> None:
    in_flight: deque[_Exchanged] = deque()
    for chunk in chunks:
        if len(in_flight) == _CHUNKS_IN_FLIGHT:
            in_flight.popleft().finish()
        in_flight.append(start(chunk))
    while in_flight:
        in_flight.popleft().finish()


def _chunks(held: Sequence[Held], tensors: Sequence[Tensor], comm: Comm, chunk_bytes: int) -> Iterator[_Chunk]:
    """A chunk of each home's tensors after the other; alike on all devices but for contents."""
    homes = [
        _parts([tensor for h, tensor in zip(held, tensors, strict=True) if h.home == home], chunk_bytes)
        for home in range(comm.world_size)
    ]
    for chunk in zip_longest(*homes, fillvalue=[]):
        yield list(chunk)


def _parts(tensors: Sequence[Tensor], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """Parts of tensors, flat and in place, up to ``chunk_bytes`` together."""
    chunk: list[Tensor] = []
    room = 0
    for tensor in tensors:
        rest = tensor.view(-1)
        while rest.numel():
            if room == 0:
                if chunk:
                    yield chunk
                chunk, room = [], max(1, chunk_bytes // rest.element_size())
            chunk.append(rest[:room])
            rest, room = rest[room:], room - chunk[-1].numel()
    if chunk:
        yield chunk


class _Summed:
    """One chunk of each home's gradients on its way."""

    def __init__(self, chunk: _Chunk, walkers: Sequence[int], comm: Comm) -> None:
        rank = comm.rank
        self._mine = chunk[rank]
        numbers = sum(part.numel() for part in self._mine)
        self._arriving = [
            comm.start_receive(self._mine[0].new_empty(numbers), source, _GRADIENTS_TAG)
            for source in walkers
            if source != rank and numbers
        ]
        self._leaving = [
            comm.start_send(_joined(parts), home, _GRADIENTS_TAG, exact=True)
            for home, parts in enumerate(chunk)
            if home != rank and rank in walkers and parts
        ]

    def finish(self) -> None:
        for message in self._arriving:
            added = message.wait().split([part.numel() for part in self._mine])
            torch._foreach_add_(self._mine, added)
        for message in self._leaving:
            message.wait()


class _Spread:
    """One chunk of each home's values on its way."""

    def __init__(self, chunk: _Chunk, comm: Comm) -> None:
        self._rank = comm.rank
        # Gloo may read and write the tensor until the message is there: never a trained tensor itself
        self._coming = [
            (home, parts, comm.broadcast(torch.cat(parts), home)) for home, parts in enumerate(chunk) if parts
        ]

    def finish(self) -> None:
        for home, parts, message in self._coming:
            values = message.wait()
            if home != self._rank:
                torch._foreach_copy_(parts, values.split([part.numel() for part in parts]))


class _Passed:
    """One chunk of each home's values on its way to a few devices."""

    def __init__(self, chunk: _Chunk, holders: Sequence[int], comm: Comm) -> None:
        rank = comm.rank
        self._leaving, self._coming = [], []
        for home, parts in enumerate(chunk):
            if home == rank and parts:
                values = torch.cat(parts)
                others = [other for other in holders if other != rank]
                self._leaving += [comm.start_send(values, other, _VALUES_TAG, exact=True) for other in others]
            elif parts:
                numbers = sum(part.numel() for part in parts)
                asked = comm.start_receive(parts[0].new_empty(numbers), home, _VALUES_TAG)
                self._coming.append((parts, asked))

    def finish(self) -> None:
        for parts, message in self._coming:
            torch._foreach_copy_(parts, message.wait().split([part.numel() for part in parts]))
        for message in self._leaving:
            message.wait()


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
