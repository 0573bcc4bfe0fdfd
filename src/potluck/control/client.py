"""A member's side of the front door: dials out, trusts one certificate, retries what a bad network broke."""

import base64
import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx

from potluck.control.invite import Invite
from potluck.control.pinned import pinned_context
from potluck.control.versions import versions
from potluck.errors import BadInput, DeviceLost, PotluckError, from_outside

Answer = TypeVar("Answer")

PATIENCE_S = 8.0
"""How long an answer is tried for after a first failure of the network."""
_ANSWER_S = 10.0
_LISTING_S = 3600.0  # the coordinator may have to read the whole model once, from a slow disk
_LONGEST_WAIT_S = 5.0
_FAREWELL_S = 2.0
_RANGES = 20_000  # in one request
_EVENT_BYTES = 4 << 20


@dataclass(frozen=True)
class Access:
    """What a process needs to speak to the coordinator; JSON, so that a parent can hand it to a child over a pipe."""

    url: str
    fingerprint: bytes
    token: str = field(repr=False)

    def to_json(self) -> dict[str, str]:
        """As a JSON object."""
        return {**asdict(self), "fingerprint": self.fingerprint.hex()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        return cls(content["url"], bytes.fromhex(content["fingerprint"]), content["token"])


class Client:
    """A connection of one process to its coordinator; its methods may be called from several threads.

    All but ``leave`` raise ``BadInput`` with the coordinator's sentence where it refuses, and ``DeviceLost`` where it
    does not answer for ``patience_s``.
    """

    def __init__(self, access: Access, *, patience_s: float = PATIENCE_S) -> None:
        """See that the coordinator is who it must be; raises ``BadInput`` if not, and nothing was sent."""
        url = httpx.URL(access.url)
        self.access = access
        self._where = f"{url.host}:{url.port}"
        self._patience_s = patience_s
        self._stream = secrets.token_hex(8)
        self._told = 0
        self._telling = threading.Lock()
        self._acknowledged = 0
        context = self._patiently(lambda: pinned_context(url.host, url.port or 443, access.fingerprint))
        self._http = httpx.Client(
            base_url=access.url,
            verify=context,
            trust_env=False,
            timeout=_ANSWER_S,
            headers={"Authorization": f"Bearer {access.token}", "Accept-Encoding": "identity"},
        )

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
        host = f"[{invite.host}]" if ":" in invite.host else invite.host
        url = f"https://{host}:{invite.port}"
        member = {
            "name": name,
            "address": address,
            "versions": versions(),
            "has_data": has_data,
            "threads": threads,
            "machine": dict(machine),
        }
        with cls(Access(url, invite.fingerprint, invite.secret), patience_s=patience_s) as stranger:
            body = {"attempt": secrets.token_hex(16), "member": member}
            token = str(stranger._ask("POST", "/join", body).json()["token"])
        return cls(Access(url, invite.fingerprint, token), patience_s=patience_s)

    def next(self) -> dict[str, Any] | None:
        """The next instruction, each once and in order; None if there was none for a few seconds.

        This is the member's heartbeat: one thread calls it again and again.
        """
        response = self._ask("GET", f"/next?after={self._acknowledged}")
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
                    self._ask("POST", "/events", {"stream": self._stream, "first": self._told + 1, "events": batch})
                    self._told += len(batch)
            except BaseException:
                # nobody knows whether these arrived: under their numbers others could be taken for them and dropped
                self._stream, self._told = secrets.token_hex(8), 0
                raise

    def leave(self, message: str) -> None:
        """Give the place back and say why; a coordinator that does not answer is not waited for."""
        with contextlib.suppress(httpx.TransportError):
            self._http.post("/leave", json={"message": message[:10_000]}, timeout=_FAREWELL_S)

    def model_files(self) -> list[dict[str, Any]]:
        """``{"name", "size", "sha256"}`` of each file of the model."""
        return list(self._ask("GET", "/model", read_s=_LISTING_S).json())

    def ranges(self, file: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of ``ranges`` (pairs of offset and length) of a model file, joined, in chunks as they come.

        Raises:
            PotluckError: the coordinator sent fewer or more bytes than asked for.
        """
        for start in range(0, len(ranges), _RANGES):
            yield from self._some_ranges(file, list(ranges[start : start + _RANGES]))

    def store_set(self, generation: int, key: str, value: bytes) -> None:
        """Store a value for all devices of a generation."""
        self._ask("PUT", _place(generation, key), value)

    def store_get(self, generation: int, key: str, wait_s: float = 0.0) -> bytes | None:
        """The value, or None if it is not there within ``wait_s`` seconds."""
        deadline = time.monotonic() + wait_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait_ms = int(1000 * min(left, _LONGEST_WAIT_S))
            response = self._ask("GET", f"{_place(generation, key)}?wait_ms={wait_ms}", accept=(404,))
            if response.status_code == 200:
                return response.content
            if time.monotonic() >= deadline - 0.001:
                return None

    def store_add(self, generation: int, key: str, amount: int) -> int:
        """Add to a number, absent ones being 0; what it is now."""
        body = {"request": secrets.token_hex(16), "add": amount}
        return int(self._ask("POST", _place(generation, key), body).json()["total"])

    def store_compare_set(self, generation: int, key: str, expected: bytes, desired: bytes) -> bytes:
        """Store ``desired`` where the value is ``expected``, or absent and ``expected`` empty; the value after it."""
        body = {
            "request": secrets.token_hex(16),
            "expected": base64.b64encode(expected).decode(),
            "desired": base64.b64encode(desired).decode(),
        }
        return self._ask("POST", _place(generation, key), body).content

    def store_delete(self, generation: int, key: str) -> bool:
        """Forget a value; whether there was one. A retried one may say that there was none."""
        return bool(self._ask("DELETE", _place(generation, key)).json()["deleted"])

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        *,
        read_s: float = _ANSWER_S,
        accept: tuple[int, ...] = (),
    ) -> httpx.Response:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        timeout = httpx.Timeout(_ANSWER_S, read=read_s)
        response = self._patiently(lambda: self._http.request(method, path, content=content, timeout=timeout))
        if response.status_code not in accept:
            self._check(response)
        return response

    def _some_ranges(self, file: str, left: list[tuple[int, int]]) -> Iterator[bytes]:
        """Asks again for what is left where the connection broke; each chunk that comes renews the patience."""
        first_failure: float | None = None
        while left:
            try:
                with self._http.stream("POST", "/model/ranges", json={"file": file, "ranges": left}) as response:
                    if response.status_code != 200:
                        response.read()
                        self._check(response)
                    for chunk in response.iter_raw():
                        first_failure = None
                        left = _without_first(left, len(chunk))
                        yield chunk
                if any(length for _, length in left):
                    raise PotluckError(f"The coordinator at {self._where} sent less of {file} than was asked for.")
                return
            except httpx.TransportError as error:
                first_failure = self._pause(first_failure, error)

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        first_failure: float | None = None
        while True:
            try:
                return ask()
            except (httpx.TransportError, OSError) as error:
                first_failure = self._pause(first_failure, error)

    def _pause(self, first_failure: float | None, error: Exception) -> float:
        """Wait before another try, longer each time; the time of the first failure.

        Raises:
            DeviceLost: the patience is at an end.
        """
        now = time.monotonic()
        first_failure = now if first_failure is None else first_failure
        waited = now - first_failure
        if waited >= self._patience_s:
            raise DeviceLost(
                f"The coordinator at {self._where} does not answer (any more): it ended, or the network between is "
                f"broken or closed by a firewall ({str(error) or type(error).__name__})."
            ) from error
        time.sleep(min(0.05 + waited, 1.0, self._patience_s - waited))
        return first_failure

    def _check(self, response: httpx.Response) -> None:
        if response.status_code < 300:
            return
        try:
            message = from_outside(response.json()["message"])
        except (ValueError, KeyError, TypeError):
            message = f"The coordinator at {self._where} failed with HTTP status {response.status_code}."
        raise (BadInput if response.status_code < 500 else PotluckError)(message)


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


def _without_first(ranges: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """What is left of ``ranges`` when their first ``count`` bytes are there."""
    for i, (offset, length) in enumerate(ranges):
        if count < length:
            return [(offset + count, length - count), *ranges[i + 1 :]]
        count -= length
    return []
