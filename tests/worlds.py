"""Ranks as threads of one process, each with a Gloo group of its own.

Threads and groups of a world size are made once and used again, until something fails in them.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup  # type: ignore[attr-defined]

from potluck.chain.comm import Comm, Listener, gloo_group
from potluck.errors import DeviceLost

T = TypeVar("T")


class _World:
    """One thread a rank; a rank's thread is always the same."""

    def __init__(self, world_size: int) -> None:
        store = dist.HashStore()
        self.threads = [
            ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) for _ in range(world_size)
        ]
        made = [
            thread.submit(gloo_group, store, rank, world_size, "127.0.0.1", timeout_s=20)
            for rank, thread in enumerate(self.threads)
        ]
        self.groups: list[ProcessGroup | None] = [each.result() for each in made]

    def take_group(self, rank: int) -> ProcessGroup:
        """The group, which from now on lives as long as its taker."""
        group, self.groups[rank] = self.groups[rank], None
        assert group is not None
        return group


_lasting = cache(_World)


def run_world(
    world_size: int,
    body: Callable[[Comm], T],
    *,
    wire: torch.dtype | None = None,
    listener: Callable[[int], Listener] | None = None,
    ranks_end: bool = False,
) -> list[T]:
    """What ``body`` returns on each rank; with ``ranks_end`` a rank that returns takes its end of the group along."""
    world = _World(world_size) if ranks_end else _lasting(world_size)

    def rank_body(rank: int) -> T:
        group = world.take_group(rank) if ranks_end else world.groups[rank]
        return body(Comm(group, wire=wire, listener=listener(rank) if listener else None))

    futures: list[Future[T]] = [thread.submit(rank_body, rank) for rank, thread in enumerate(world.threads)]
    wait(futures)
    errors = [error for future in futures if (error := future.exception())]
    if errors:
        _lasting.cache_clear()
    if errors or ranks_end:
        for thread in world.threads:
            thread.shutdown()
    if errors:
        causes = [error for error in errors if not isinstance(error, DeviceLost)]
        raise (causes or errors)[0]  # and not what the other ranks say of it
    return [future.result() for future in futures]
