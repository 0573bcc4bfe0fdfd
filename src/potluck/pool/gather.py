"""The trained tensors of all devices, brought together on rank 0: parts by their ranges, or whole ones by name."""

import json
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.trained import Trained

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}


def gather_whole(trained: Sequence[Trained], comm: Comm) -> Iterator[tuple[str, Tensor]]:
    """Yield each whole tensor on rank 0, one after the other; other ranks send their parts and yield nothing.

    Every rank must run it to the end.
    """
    for t in trained:
        local = t.local.detach()
        if t.dim is None:
            if comm.rank == 0:
                yield t.name, local
            continue
        if comm.rank != 0:
            if local.numel():
                comm.send(local, 0)
            continue
        whole = local.new_empty(t.shape)
        _place(whole, t, 0, local)
        for rank in range(1, comm.world_size):
            shape = list(t.shape)
            shape[t.dim] = len(t.held[rank])
            if shape[t.dim]:
                _place(whole, t, rank, comm.receive(local.new_empty(shape), rank))
        yield t.name, whole


def _place(whole: Tensor, t: Trained, rank: int, part: Tensor) -> None:
    assert t.dim is not None
    start = 0
    for first, last in t.held[rank].spans:
        length = last - first
        whole.narrow(t.dim, first, length).copy_(part.narrow(t.dim, start, length))
        start += length


def gather_named(
    tensors: Sequence[tuple[str, Tensor]], comm: Comm, ranks: Sequence[int]
) -> Iterator[tuple[str, Tensor]]:
    """Yield on rank 0 every tensor of ``ranks``, one after the other; each rank has its own, which only it knows of.

    Other ranks first tell names, shapes and dtypes, then send the tensors, and yield nothing. Every rank must run it to
    the end.

    Args:
        tensors: this rank's, float32 or float64, by name.
        comm: the messages.
        ranks: all of them, in the order in which their tensors are wanted.
    """
    if comm.rank != 0:
        told = json.dumps([[name, [*tensor.shape], str(tensor.dtype)] for name, tensor in tensors]).encode()
        comm.send(torch.tensor([len(told)]), 0)
        comm.send(torch.frombuffer(bytearray(told), dtype=torch.uint8), 0)
        for _, tensor in tensors:
            comm.send(tensor, 0)
        return
    for rank in ranks:
        if rank == 0:
            for name, tensor in tensors:
                yield name, tensor.detach()
            continue
        length = int(comm.receive(torch.zeros(1, dtype=torch.long), rank))
        content = comm.receive(torch.empty(length, dtype=torch.uint8), rank)
        for name, shape, dtype in json.loads(content.numpy().tobytes()):
            yield name, comm.receive(torch.empty(shape, dtype=_DTYPES[dtype]), rank)
