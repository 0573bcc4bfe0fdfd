"""What messages between devices cost."""

import ipaddress
import math
import socket
import time

import psutil
import torch
from torch import Tensor

from potluck.chain.comm import Comm, Message
from potluck.pool.profile import Link

_SMALL_BYTES, _LARGE_BYTES = 16 << 10, 4 << 20
_SMALL_REPEATS, _LARGE_REPEATS = 21, 5
_COVERED_MESSAGES, _COVERED_REPEATS = 12, 5
_COVER = 1.5  # of a message's own time, so that it is over before the compute that covers it
_MATRIX = 192
_LAN_LATENCY_S = 3e-4
_NOWHERE = "192.0.2.1"  # documentation's network (RFC 5737): a route to it is the default route


def measure_link(comm: Comm, message_bytes: int) -> Link:
    """Time all-reduces of two sizes over the group; all ranks call this together.

    With ``t(n) = latency + n / rate``, both follow from the medians at 16 KiB and 4 MiB, each the largest of any
    rank's: on these all ranks agree. What a message costs the compute that covers it is each device's own: the same
    compute is timed with a message of ``message_bytes`` (what the job sends) in flight and without one. The processor
    that copies, sends and sums it is the one that computes.

    Raises:
        ValueError: the device is alone.
        DeviceLost: another device ended.
    """
    if comm.group is None or comm.world_size < 2:
        raise ValueError("a link is between devices: this one is alone")
    own = [_median_s(comm, _SMALL_BYTES, _SMALL_REPEATS), _median_s(comm, _LARGE_BYTES, _LARGE_REPEATS)]
    small_s, large_s = comm.all_gather(torch.tensor(own, dtype=torch.float64)).wait().amax(0).tolist()
    s_per_byte = max((large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES), 1e-13)
    latency_s = max(0.0, small_s - _SMALL_BYTES * s_per_byte)
    return Link(
        latency_s=latency_s,
        bytes_per_s=1 / s_per_byte,
        world_size=comm.world_size,
        covered_bytes=message_bytes,
        covered_s=_covered_s(comm, message_bytes, latency_s + message_bytes * s_per_byte),
    )


def _median_s(comm: Comm, size: int, repeats: int) -> float:
    x = torch.zeros(size // 4)
    comm.all_reduce(x, exact=True).wait()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        comm.all_reduce(x, exact=True).wait()
        times.append(time.perf_counter() - start)
    return sorted(times)[repeats // 2]


def _covered_s(comm: Comm, size: int, message_s: float) -> float:
    """Seconds that a message adds to compute which covers it."""
    x, m = torch.zeros(max(1, size // 4)), torch.randn(_MATRIX, _MATRIX)
    products = max(1, math.ceil(_COVER * message_s / _computed_s(comm, m, 20) * 20))
    added = []
    for _ in range(_COVERED_REPEATS):
        comm.all_reduce(torch.zeros(1)).wait()  # all begin together
        alone_s = sum(_computed_s(comm, m, products) for _ in range(_COVERED_MESSAGES))
        together_s = 0.0
        for _ in range(_COVERED_MESSAGES):
            message, compute_s = _with_message(comm, x, m, products)
            message.wait()
            together_s += compute_s
        added.append((together_s - alone_s) / _COVERED_MESSAGES)
    return max(0.0, sorted(added)[_COVERED_REPEATS // 2])


def _with_message(comm: Comm, x: Tensor, m: Tensor, products: int) -> tuple[Message, float]:
    start = time.perf_counter()
    message = comm.all_reduce(x, exact=True)
    _compute(comm, m, products)
    return message, time.perf_counter() - start


def _computed_s(comm: Comm, m: Tensor, products: int) -> float:
    start = time.perf_counter()
    _compute(comm, m, products)
    return time.perf_counter() - start


def _compute(comm: Comm, m: Tensor, products: int) -> None:
    for _ in range(products):
        m @ m
    comm.catch_up()


def nic_link(address: str = _NOWHERE) -> Link | None:
    """What the network interface that routes to ``address`` promises, for two devices; nothing is sent.

    ``address`` is numeric, IPv4 or IPv6; left out, the interface of the default route is asked. Its speed is taken for
    the rate of an all-reduce, and 0.3 ms for its latency, as in a wired home network. None where there is no route, or
    the interface tells no speed (loopback, most wireless and virtual ones).

    Raises:
        ValueError: ``address`` is not numeric.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(address.partition("%")[0]).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((address, 9))
            local = asking.getsockname()[0]
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == local for each in addresses):
            interface = psutil.net_if_stats().get(name)
            if interface is None or not interface.isup or interface.speed <= 0:
                return None
            return Link(latency_s=_LAN_LATENCY_S, bytes_per_s=interface.speed * 1e6 / 8)
    return None
