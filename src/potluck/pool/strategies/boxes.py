"""Messages between two devices of a pipeline: sent without waiting, and asked for before they are needed."""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from potluck.chain.comm import Comm, Message


class Inbox:
    """Contents that one device sends one after the other."""

    def __init__(
        self, comm: Comm, source: int, tag: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> None:
        """Ask for the first.

        Args:
            comm: the messages.
            source: the sender's rank.
            tag: of these messages alone.
            shapes: of all contents that will come, in order.
            dtype: of the contents before they travel.
        """
        self._asking = self._asked(comm, source, tag, shapes, dtype)
        self._coming = deque(islice(self._asking, 1))

    def take(self) -> Tensor:
        """The next content, once it is there; the one after it is asked for, and travels meanwhile.

        Raises:
            DeviceLost: another device ended.
        """
        self._coming.extend(islice(self._asking, 1))
        return self._coming.popleft().wait()

    @staticmethod
    def _asked(
        comm: Comm, source: int, tag: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> Iterator[Message]:
        for shape in shapes:
            yield comm.start_receive(torch.empty(shape, dtype=comm.travels(dtype)), source, tag)


class Outbox:
    """Contents for one device, kept until they have left."""

    def __init__(self, comm: Comm, to: int, tag: int, *, most: int) -> None:
        """Prepare.

        Args:
            comm: the messages.
            to: the receiver's rank.
            tag: of these messages alone.
            most: how many may be on their way; who sends one more waits for the oldest to leave.
        """
        self._comm, self._to, self._tag, self._most = comm, to, tag, most
        self._leaving: deque[Message] = deque()

    def put(self, content: Tensor) -> None:
        """Start sending ``content``, which must not change any more, in the dtype that travels.

        Raises:
            DeviceLost: another device ended.
        """
        if len(self._leaving) == self._most:
            self._leaving.popleft().wait()
        self._leaving.append(self._comm.start_send(content, self._to, self._tag))

    def empty(self) -> None:
        """Wait until everything has left.

        Raises:
            DeviceLost: another device ended.
        """
        while self._leaving:
            self._leaving.popleft().wait()


class Delivery:
    """Whole numbers, ids or labels of each micro-batch, from those who own them to the one device that needs them."""

    def __init__(
        self,
        comm: Comm,
        owners: Sequence[int],
        own: Sequence[Tensor | None],
        shapes: Sequence[tuple[int, ...]],
        to: int,
        tag: int,
    ) -> None:
        """Send or ask for all of a step; the receiver owns what it takes.

        Args:
            comm: the messages; with a device alone, there are none.
            owners: rank of each micro-batch's owner.
            own: contents, int64, where they are owned.
            shapes: of the contents.
            to: the receiver's rank.
            tag: of these messages alone.
        """
        self._own = own
        self._leaving: list[Message] = []
        self._coming: dict[int, Message] = {}
        for m, (owner, content, shape) in enumerate(zip(owners, own, shapes, strict=True)):
            if owner == to:
                continue
            if comm.rank == owner and content is not None:
                self._leaving.append(comm.start_send(content, to, tag))
            elif comm.rank == to:
                self._coming[m] = comm.start_receive(torch.empty(shape, dtype=torch.long), owner, tag)

    def take(self, m: int) -> Tensor:
        """What micro-batch ``m`` has; on the receiver alone.

        Raises:
            DeviceLost: another device ended.
        """
        if m in self._coming:
            return self._coming.pop(m).wait()
        content = self._own[m]
        assert content is not None
        return content

    def empty(self) -> None:
        """Wait until everything has left.

        Raises:
            DeviceLost: another device ended.
        """
        for message in self._leaving:
            message.wait()
