"""Ranks as threads of one process, each with a Gloo group of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from potluck.chain.comm import Comm, Listener, gloo_group
from potluck.errors import DeviceLost

T = TypeVar("T")


def run_world(
    world_size: int,
    body: Callable[[Comm], T],
    *,
    wire: torch.dtype | None = None,
    listener: Callable[[int], Listener] | None = None,
) -> list[T]:
    """What ``body`` returns on each rank."""
    store = dist.HashStore()

    def rank_body(rank: int) -> T:
        torch.set_num_threads(1)
        group = gloo_group(store, rank, world_size, "127.0.0.1", timeout_s=20)
        return body(Comm(group, wire=wire, listener=listener(rank) if listener else None))

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(rank_body, rank) for rank in range(world_size)]
    causes = [error for future in futures if (error := future.exception()) and not isinstance(error, DeviceLost)]
    if causes:
        raise causes[0]  # and not what the other ranks say of it
    return [future.result() for future in futures]
