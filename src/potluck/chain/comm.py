"""Every message between devices goes through one :class:`Comm`; it also keeps the clocks."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from potluck.chain.pace import Pace, handing_over
from potluck.errors import DeviceLost

Listener = Callable[[str, Tensor], None]
"""Told of each message before it leaves: its kind and its content."""


@dataclass
class Clocks:
    """Seconds this device was blocked, and what it sent."""

    blocked_s: list[float] = field(default_factory=list)
    """By messages of all devices, one entry a wait: every device waits for them equally often, in the same order."""
    awaited_s: float = 0.0
    """By messages between two devices, which every device has as many of as its work wants."""
    bytes_sent: int = 0

    def restart(self) -> None:
        """Count seconds anew; bytes go on."""
        self.blocked_s.clear()
        self.awaited_s = 0.0


class Message:
    """A message on its way; :meth:`wait` gives what arrives."""

    def __init__(self, comm: "Comm", work: dist.Work | None, content: Tensor, *, between_two: bool = False) -> None:
        self._comm, self._work, self._content, self._between_two = comm, work, content, between_two

    def wait(self) -> Tensor:
        """The content, once it is there; the time spent here is the clock's blocked time.

        Raises:
            DeviceLost: another device ended or did not answer in time.
        """
        if self._work is not None:
            self._comm.finish(self._work, between_two=self._between_two)
            self._work = None
        return self._content


class Comm:
    """The messages of one generation of devices; out of place, so no piece's tensor ever changes under it.

    Without a ``group`` the device is alone and each message is its own answer: ``single`` walks so. A ``pace`` makes it
    an emulated device, slower than this machine.
    """

    def __init__(
        self,
        group: ProcessGroup | None = None,
        *,
        wire: torch.dtype | None = None,
        listener: Listener | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.group = group
        self.rank = group.rank() if group else 0
        self.world_size = group.size() if group else 1
        self.wire = wire
        self.clocks = Clocks()
        self._listener = listener
        self._pace = pace

    def travels(self, dtype: torch.dtype) -> torch.dtype:
        """What activations of this dtype, and their gradients, travel in; whole numbers travel as they are."""
        return dtype if self.group is None or self.wire is None or not dtype.is_floating_point else self.wire

    def all_reduce(self, x: Tensor, *, exact: bool = False) -> Message:
        """Start summing ``x`` over all devices; the answer travels and arrives in the wire's dtype.

        ``exact`` keeps the dtype of ``x`` (scalars, gradients of parameters).
        """
        if self.group is None:
            return Message(self, None, x)
        content = x.detach().to(x.dtype if exact else self.travels(x.dtype), copy=True).contiguous()
        self._leaves("all_reduce", content, 2 * (self.world_size - 1) / self.world_size)
        return self._sent(lambda group: group.allreduce([content]), content)

    def all_gather(self, x: Tensor) -> Message:
        """Start collecting every device's ``x`` (equal shapes) into ``[world_size, *x.shape]``."""
        if self.group is None:
            return Message(self, None, x[None])
        content = x.detach().contiguous()
        self._leaves("all_gather", content, self.world_size - 1)
        gathered = content.new_empty(self.world_size, *content.shape)
        return self._sent(lambda group: group.allgather([list(gathered.unbind(0))], [content]), gathered)

    def broadcast(self, x: Tensor, source: int) -> Message:
        """Start filling ``x`` on every device with the content it has on ``source``."""
        if self.group is None:
            return Message(self, None, x)
        if self.rank == source:
            self._leaves("broadcast", x, self.world_size - 1)
        options = dist.BroadcastOptions()
        options.rootRank = source
        return self._sent(lambda group: group.broadcast([x], options), x)

    def start_send(self, x: Tensor, to: int, tag: int, *, exact: bool = False) -> Message:
        """Start sending ``x`` to one device, in the wire's dtype unless ``exact``; :meth:`Message.wait` when it must
        have left.

        Messages of one tag arrive in the order in which they were sent. Content travels once its receiver has called
        :meth:`start_receive`. Where neither dtype nor strides need a copy, ``x`` itself is sent: it must not change
        before the message has left.
        """
        content = x.detach().to(x.dtype if exact else self.travels(x.dtype)).contiguous()
        self._leaves("send", content, 1)
        return self._sent(lambda group: group.send([content], to, tag), content, between_two=True)

    def start_receive(self, x: Tensor, source: int, tag: int) -> Message:
        """Start filling ``x``, contiguous and of the dtype that travels, with what ``source`` sends under ``tag``."""
        return self._sent(lambda group: group.recv([x], source, tag), x, between_two=True)

    def send(self, x: Tensor, to: int) -> None:
        """Send ``x`` to one device as it is and wait until it has left."""
        self.start_send(x, to, 0, exact=True).wait()

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Fill ``x`` with what ``source`` sends."""
        return self.start_receive(x, source, 0).wait()

    def finish(self, work: dist.Work, *, between_two: bool = False) -> None:
        """Wait for ``work`` by the clock."""
        self.catch_up()
        start = time.perf_counter()
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost(error) from error
        blocked_s = time.perf_counter() - start
        if between_two:
            self.clocks.awaited_s += blocked_s
        else:
            self.clocks.blocked_s.append(blocked_s)
        if self._pace is not None:
            self._pace.restart()

    def catch_up(self) -> None:
        """Let a paced device take as long as it would for what it has computed."""
        if self._pace is not None:
            self._pace.catch_up()

    def _sent(
        self, start: Callable[[ProcessGroup], dist.Work], content: Tensor, *, between_two: bool = False
    ) -> Message:
        assert self.group is not None
        if content.numel() == 0:
            return Message(self, None, content)
        self.catch_up()
        try:
            with handing_over() if self._pace is not None else nullcontext():
                work = start(self.group)
            return Message(self, work, content, between_two=between_two)
        except RuntimeError as error:
            raise _lost(error) from error

    def _leaves(self, kind: str, content: Tensor, times: float) -> None:
        self.clocks.bytes_sent += int(content.numel() * content.element_size() * times)
        if self._listener is not None:
            self._listener(kind, content)


def gloo_group(store: Store, rank: int, world_size: int, hostname: str, timeout_s: float) -> ProcessGroup:
    """A Gloo process group that listens only on the interface of ``hostname``; no global group is touched.

    Raises:
        DeviceLost: another device did not come, or left.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout_s)
    try:
        options._devices = [ProcessGroupGloo.create_device(hostname=hostname)]
        group: ProcessGroup = ProcessGroupGloo(store, rank, world_size, options)  # type: ignore[assignment]
    except RuntimeError as error:
        raise _lost(error) from error
    return group


def _lost(error: RuntimeError) -> DeviceLost:
    return DeviceLost(f"Another device ended, or did not answer in time ({str(error).splitlines()[0]}).")
