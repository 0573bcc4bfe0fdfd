"""A member's side of the front door: takes a place, fetches instructions, tells events, uses the store."""

import base64
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import quote

import httpx

from potluck.control.connection import PATIENCE_S, Access, Connection
from potluck.control.invite import Invite
from potluck.control.versions import versions

_LONGEST_WAIT_S = 5.0
_FAREWELL_S = 2.0
_EVENT_BYTES = 4 << 20


class Client(Connection):
    """A member's connection to its coordinator.

    ``leave`` waits for nobody; all else raises as :class:`Connection` says.
    """

    def __init__(self, access: Access, *, patience_s: float = PATIENCE_S) -> None:
        """See that the coordinator is who it must be; raises ``BadInput`` if not, and nothing was sent."""
        super().__init__(access, patience_s=patience_s)
        self._stream = secrets.token_hex(8)
        self._told = 0
        self._telling = threading.Lock()
        self._acknowledged = 0

    @classmethod
    def join(
        cls,
        invite: Invite,
        name: str,
        address: str,
        has_data: bool,
        threads: int,
        machine: Mapping[str, Any],
        *,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """Take a place in the pool.

        Args:
            invite: from the coordinator.
            name: unique in the pool.
            address: where this device's messages leave (:func:`potluck.control.address.address_towards`).
            has_data: whether it brings examples.
            threads: that it computes with.
            machine: what else the coordinator is to know of it, as JSON.

        Raises:
            BadInput: refused, or another coordinator answers there; the sentence says why.
            DeviceLost: nothing answers at the invite's address.
        """
        member = {
            "name": name,
            "address": address,
            "versions": versions(),
            "has_data": has_data,
            "threads": threads,
            "machine": dict(machine),
        }
        with cls(Access.by_invite(invite), patience_s=patience_s) as stranger:
            body = {"attempt": secrets.token_hex(16), "member": member}
            token = str(stranger.ask("POST", "/join", body).json()["token"])
        return cls(Access.by_invite(invite, token), patience_s=patience_s)

    def next(self) -> dict[str, Any] | None:
        """The next instruction, each once and in order; None if there was none for a few seconds.

        This is the member's heartbeat: one thread calls it again and again.
        """
        response = self.ask("GET", f"/next?after={self._acknowledged}")
        if response.status_code == 204:
            return None
        content = response.json()
        self._acknowledged = int(content["number"])
        return dict(content["do"])

    def post(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Tell events; each arrives once and in the order of the calls."""
        with self._telling:
            try:
                for batch in _batches([dict(event) for event in events]):
                    self.ask("POST", "/events", {"stream": self._stream, "first": self._told + 1, "events": batch})
                    self._told += len(batch)
            except BaseException:
                # nobody knows whether these arrived: under their numbers others could be taken for them and dropped
                self._stream, self._told = secrets.token_hex(8), 0
                raise

    def leave(self, message: str) -> None:
        """Give the place back and say why; a coordinator that does not answer is not waited for."""
        with contextlib.suppress(httpx.TransportError):
            self._http.post("/leave", json={"message": message[:10_000]}, timeout=_FAREWELL_S)

    def store_set(self, generation: int, key: str, value: bytes) -> None:
        """Store a value for all devices of a generation."""
        self.ask("PUT", _place(generation, key), value)

    def store_get(self, generation: int, key: str, wait_s: float = 0.0) -> bytes | None:
        """The value, or None if it is not there within ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait_ms = int(1000 * min(left, _LONGEST_WAIT_S))
            response = self.ask("GET", f"{_place(generation, key)}?wait_ms={wait_ms}", accept=(404,))
            if response.status_code == 200:
                return response.content
            if time.monotonic() >= deadline - 0.001:
                return None

    def store_add(self, generation: int, key: str, amount: int) -> int:
        """Add to a number, absent ones being 0; what it is now."""
        body = {"request": secrets.token_hex(16), "add": amount}
        return int(self.ask("POST", _place(generation, key), body).json()["total"])

    def store_compare_set(self, generation: int, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` where the value is ``expected``, or absent and ``expected`` empty; the value after it."""
        body = {
            "request": secrets.token_hex(16),
            "expected": base64.b64encode(expected).decode(),
            "desired": base64.b64encode(desired).decode(),
        }
        return self.ask("POST", _place(generation, key), body).content

    def store_delete(self, generation: int, key: str) -> bool:
        """Forget a value; whether there was one. A retried one may say that there was none."""
        return bool(self.ask("DELETE", _place(generation, key)).json()["deleted"])


def _place(generation: int, key: str) -> str:
    return f"/store/{generation}/{quote(key, safe='')}"


def _batches(events: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Events in requests that stay below what the coordinator takes."""
    batch: list[dict[str, Any]] = []
    size = 0
    for event in events:
        length = len(json.dumps(event))
        if batch and size + length > _EVENT_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(event)
        size += length
    if batch:
        yield batch
