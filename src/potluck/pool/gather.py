"""The trained tensors of all devices, brought together on rank 0 by their ranges."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.trained import Trained


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
