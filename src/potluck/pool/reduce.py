"""Gradients that every device has a term of, summed where they are needed.

A gradient is needed at its tensor's home alone, which steps the tensor and gives everyone its values. So each device
sends it there directly: ``(n - 1) / n`` of all gradients instead of the ``2 (n - 1) / n`` of an all-reduce. The home
adds what comes in the order of ranks.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.pool.gradients import Held

CHUNK_BYTES = 4 << 20
"""Of gradients on their way to one home at once."""
_GRADIENTS_TAG = 2
_CHUNKS_IN_FLIGHT = 2


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
    homes = [list(_chunks([h for h in held if h.home == home], chunk_bytes)) for home in range(comm.world_size)]
    in_flight: deque[_Exchanged] = deque()
    for chunk_of_home in zip_longest(*homes, fillvalue=[]):
        if len(in_flight) == _CHUNKS_IN_FLIGHT:
            in_flight.popleft().finish()
        in_flight.append(_Exchanged(chunk_of_home, walkers, comm))
    while in_flight:
        in_flight.popleft().finish()
    for h in held:
        if h.home != rank:
            h.trained.local.grad = None
    # all devices take part at the same point, so clocks read it as one message of theirs
    comm.clocks.blocked_s.append(comm.clocks.awaited_s - awaited_s)
    comm.clocks.awaited_s = awaited_s


def _chunks(held: Sequence[Held], chunk_bytes: int) -> Iterator[list[Tensor]]:
    """Parts of gradients, flat and in place, up to ``chunk_bytes`` together; alike on all devices but for contents.

    A device without gradients has the tensors' parts in their places, whose sizes alone it needs.
    """
    chunk: list[Tensor] = []
    room = 0
    for h in held:
        tensor = h.trained.local.detach() if h.trained.local.grad is None else h.trained.local.grad
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


class _Exchanged:
    """One chunk of each home on its way."""

    def __init__(self, chunk_of_home: Sequence[list[Tensor]], walkers: Sequence[int], comm: Comm) -> None:
        rank = comm.rank
        self._mine = chunk_of_home[rank]
        numbers = sum(part.numel() for part in self._mine)
        self._arriving = [
            comm.start_receive(self._mine[0].new_empty(numbers), source, _GRADIENTS_TAG)
            for source in walkers
            if source != rank and numbers
        ]
        self._leaving = [
            comm.start_send(parts[0] if len(parts) == 1 else torch.cat(parts), home, _GRADIENTS_TAG, exact=True)
            for home, parts in enumerate(chunk_of_home)
            if home != rank and rank in walkers and parts
        ]

    def finish(self) -> None:
        for message in self._arriving:
            added = message.wait().split([part.numel() for part in self._mine])
            torch._foreach_add_(self._mine, added)
        for message in self._leaving:
            message.wait()
