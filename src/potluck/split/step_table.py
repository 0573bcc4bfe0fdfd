"""Where messages of clients that stay connected wait for the thread that trains, and who of them is still here."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from potluck.errors import BadInput
from potluck.split.check import Limits
from potluck.split.dataset import Tables
from potluck.split.encoding import decode_rows, rows_layout
from potluck.split.messages import laid_out, unpack

SILENT_S = 20.0
_SLICE_S = 0.2
_MOST_EXAMPLES = 1 << 24
_TOO_LATE = "Training has begun, or gone on, without this client; it can come to the next one."


@dataclass
class Connected:
    """One client that takes part in the steps."""

    name: str
    examples: int
    target_tokens: int
    tables: Tables
    held_out: int = 0
    counts: list[int] = field(default_factory=list)
    """Its examples in each step."""
    gone: bool = False


@dataclass(frozen=True)
class Message:
    """What a client said, and where its answer goes."""

    client: str
    words: dict[str, Any]
    tensors: dict[str, Tensor]
    answer: "Future[bytes]"


class StepTable:
    """Messages of clients as they come, from the threads of the front door to the one that trains.

    ``put`` and ``alive`` are for the former, ``gather``, ``next`` and ``end`` for the latter.
    """

    def __init__(self, silent_s: float = SILENT_S) -> None:
        """``silent_s``: a client that gives no sign of life for so long has left."""
        self._messages: queue.Queue[Message] = queue.Queue()
        self._early: dict[str, Message] = {}
        self._unanswered: list[Future[bytes]] = []
        self._heard: dict[str, float] = {}
        self._lock = threading.Lock()
        self._silent_s = silent_s
        self._ended: str | None = None

    def put(self, client: str, body: bytes) -> "Future[bytes]":
        """A client's message; its answer comes from the thread that trains.

        Raises:
            BadInput: it is no message, or the training is over.
        """
        words, tensors = unpack(body)
        answer: Future[bytes] = Future()
        self.alive(client)
        with self._lock:
            if self._ended is not None:
                raise BadInput(self._ended)
            self._unanswered = [future for future in self._unanswered if not future.done()] + [answer]
        self._messages.put(Message(client, words, tensors, answer))
        return answer

    def alive(self, client: str) -> None:
        """A client gave a sign of life."""
        with self._lock:
            self._heard[client] = time.monotonic()

    def end(self, why: str) -> None:
        """Take no more messages, and answer all that wait with why."""
        with self._lock:
            self._ended = why
            for answer in self._unanswered:
                if not answer.done():
                    answer.set_exception(BadInput(why))

    def next(self, kind: str, asked: Sequence[Connected], clients: Sequence[Connected]) -> dict[str, Message]:
        """One message of a kind from each client that is asked; who is silent for too long is marked as gone.

        A client whose message is of another kind is refused, and gone. What clients say that are not asked now is
        kept until they are: one without an example in a step is ahead of the others.

        Args:
            kind: the message's word ``do``.
            asked: of ``clients``; those that are gone are passed over.
            clients: all that take part.
        """
        found: dict[str, Message] = {}
        here = {client.name: client for client in clients if not client.gone}
        wanted = {client.name: client for client in asked if not client.gone}
        for name in wanted.keys() & self._early.keys():
            self._take(self._early.pop(name), kind, wanted[name], found)
        while waited_for := [client for name, client in wanted.items() if name not in found and not client.gone]:
            try:
                message = self._messages.get(timeout=_SLICE_S)
            except queue.Empty:
                for client in waited_for:
                    client.gone = self._is_silent(client.name)
                continue
            name = message.client
            if name not in here or here[name].gone:
                message.answer.set_exception(BadInput(_TOO_LATE))
            elif name in wanted and name not in found:
                self._take(message, kind, wanted[name], found)
            elif name not in wanted and name not in self._early:
                self._early[name] = message
            else:
                self._refuse(message, here[name])
                found.pop(name, None)
        return found

    def gather(
        self, count: int, limits: Limits, on_join: Callable[[Connected], None]
    ) -> list[tuple[Connected, Message]]:
        """Wait until so many clients have begun; their order is that of their names.

        One that is silent for too long meanwhile is forgotten, and may begin again.
        """
        begun: dict[str, tuple[Connected, Message]] = {}
        while len(begun) < count:
            for name in [name for name in begun if self._is_silent(name)]:
                begun.pop(name)[1].answer.set_exception(BadInput("The client was silent for too long."))
            try:
                message = self._messages.get(timeout=_SLICE_S)
            except queue.Empty:
                continue
            try:
                client = _begun(message, limits)
            except BadInput as error:
                message.answer.set_exception(error)
                continue
            begun[client.name] = (client, message)
            on_join(client)
        return [begun[name] for name in sorted(begun)]

    def _take(self, message: Message, kind: str, client: Connected, found: dict[str, Message]) -> None:
        if message.words.get("do") == kind:
            found[client.name] = message
        else:
            self._refuse(message, client)

    def _refuse(self, message: Message, client: Connected) -> None:
        message.answer.set_exception(BadInput("The server expected another message of this client."))
        client.gone = True

    def _is_silent(self, name: str) -> bool:
        with self._lock:
            return time.monotonic() - self._heard.get(name, 0.0) > self._silent_s


def _begun(message: Message, limits: Limits) -> Connected:
    """A client that begins, with the tables it sends once."""
    words = message.words
    numbers = [words.get(name) for name in ("examples", "targets", "held_out")]
    if (
        words.get("do") != "begin"
        or not all(type(n) is int and 0 <= n < 1 << 40 for n in numbers)
        or not 0 < int(str(numbers[0])) <= _MOST_EXAMPLES
    ):
        raise BadInput("A client begins with the number of its examples, targets and held-out examples.")
    tables = Tables(*(_rows(message.tensors, part, limits) for part in ("table", "negatives")))
    examples, target_tokens, held_out = (int(str(n)) for n in numbers)
    return Connected(message.client, examples, target_tokens, tables, held_out)


def _rows(tensors: dict[str, Tensor], part: str, limits: Limits) -> Tensor:
    """The rows of a table, float32 ``[U, D]``.

    Raises:
        BadInput: they are not in the encoding that was agreed on, more than the vocabulary, or not finite.
    """
    own = {name.removeprefix(f"{part}/"): tensor for name, tensor in tensors.items() if name.startswith(f"{part}/")}
    if not own:
        return torch.empty(0, limits.hidden_size)
    rows = min(len(tensor) if tensor.ndim else 0 for tensor in own.values())
    if not 0 < rows <= limits.vocab_size:
        raise BadInput(f"The {part} has {rows} rows; 1 to {limits.vocab_size} are taken.")
    return decode_rows(laid_out(own, rows_layout(limits.agreement.encoding, rows, limits.hidden_size), part))
