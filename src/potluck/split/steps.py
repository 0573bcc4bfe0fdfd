"""Steps of clients that stay connected: each is taken once, however often it is sent and its answer asked for."""

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from starlette.concurrency import run_in_threadpool

from potluck.control.requests import Refused
from potluck.errors import BadInput
from potluck.split.messages import FIRST


@dataclass(frozen=True)
class _Step:
    number: int
    digest: bytes
    answer: asyncio.Task[bytes]

    @property
    def failed(self) -> bool:
        return self.answer.done() and (self.answer.cancelled() or self.answer.exception() is not None)


class Steps:
    """The last step of each client; methods are called in the event loop only."""

    def __init__(self, take: Callable[[str, int, bytes], Future[bytes]], slice_s: float) -> None:
        """``take``: of client, number and body, called in a worker thread; ``slice_s``: how long a request waits."""
        self._take = take
        self._slice_s = slice_s
        self._last: dict[str, _Step] = {}
        self._closing = asyncio.Event()

    def send(self, client: str, number: int, body: bytes) -> None:
        """Take a step, unless it was taken before.

        A client whose last step failed has left, and may begin anew, with step 1.

        Raises:
            Refused: the last one was of another process, or is not answered yet.
        """
        last = self._last.get(client)
        digest = hashlib.sha256(body).digest()
        if last is not None and (number, digest) == (last.number, last.digest):
            return
        if last is not None and number <= last.number and not (number == FIRST and last.failed):
            raise Refused(
                409,
                f"{client} takes part already, or did until it left: its step {last.number} was taken, and this is"
                f" another step {number}. End the other process, or take another name.",
            )
        if last is not None and not last.answer.done():
            raise Refused(409, f"Step {last.number} of {client} is not answered yet.")
        answer = asyncio.create_task(self._answer(client, number, body))
        # an error that no client comes back for is nothing to print
        answer.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        self._last[client] = _Step(number, digest, answer)

    async def answer(self, client: str, number: int) -> bytes | None:
        """A step's answer; None if it is not there within a slice of time.

        Raises:
            Refused: the step failed, or is not the last that was sent.
        """
        step = self._last.get(client)
        if step is None or step.number != number:
            raise Refused(404, f"Step {number} of {client} is not here.")
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({step.answer, closing}, timeout=self._slice_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
        if not step.answer.done() or step.answer.cancelled():
            return None
        try:
            return step.answer.result()
        except BadInput as error:
            raise Refused(422, str(error)) from None

    def close(self) -> None:
        """Let all who wait ask again later."""
        self._closing.set()

    async def _answer(self, client: str, number: int, body: bytes) -> bytes:
        future = await run_in_threadpool(self._take, client, number, body)
        # the end of this loop is none of the future, which may be answered by a thread that goes on
        return await asyncio.shield(asyncio.wrap_future(future))
