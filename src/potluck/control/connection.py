"""A connection of who dials out: trusts one certificate, and retries what a bad network broke."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from potluck.control.address import https_url
from potluck.control.invite import Invite
from potluck.control.pinned import pinned_context
from potluck.errors import BadInput, DeviceLost, PotluckError, from_outside

Answer = TypeVar("Answer")
Content = Mapping[str, Any] | bytes | Path
"""A request's body: JSON, bytes, or those of a file."""

PATIENCE_S = 8.0
"""How long an answer is tried for after a first failure of the network."""
ANSWER_S = 10.0
_LISTING_S = 3600.0  # the other side may have to read the whole model once, from a slow disk
_KEEP_ALIVE_S = 25.0  # less than the server's
_RANGES = 20_000  # in one request


@dataclass(frozen=True)
class Access:
    """What a process needs to speak to the coordinator; JSON, so that a parent can hand it to a child over a pipe."""

    url: str
    fingerprint: bytes
    token: str = field(repr=False)

    @classmethod
    def by_invite(cls, invite: Invite, token: str | None = None) -> Self:
        """Access to where an invite leads, with the invite's secret unless there is a ``token``."""
        return cls(https_url(invite.host, invite.port), invite.fingerprint, token or invite.secret)

    def to_json(self) -> dict[str, str]:
        """As a JSON object."""
        return {**asdict(self), "fingerprint": self.fingerprint.hex()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        return cls(content["url"], bytes.fromhex(content["fingerprint"]), content["token"])


class Connection:
    """What all that dial out can do; its methods may be called from several threads.

    They raise ``BadInput`` with the other side's sentence where it refuses, and ``DeviceLost`` where it does not
    answer for ``patience_s``.
    """

    def __init__(
        self,
        access: Access,
        *,
        patience_s: float = PATIENCE_S,
        who: str = "coordinator",
        through: Callable[[httpx.BaseTransport], httpx.BaseTransport] | None = None,
    ) -> None:
        """See that the other side is who it must be; raises ``BadInput`` if not, and nothing was sent.

        Args:
            access: where it is, and whom to trust.
            patience_s: how long an answer is tried for after a first failure of the network.
            who: what the other side is called in sentences.
            through: wraps the transport, to count or slow what passes.
        """
        url = httpx.URL(access.url)
        self.access = access
        self._other_side = f"The {who} at {url.host}:{url.port}"
        self._patience_s = patience_s
        context = self._patiently(lambda: pinned_context(url.host, url.port or 443, access.fingerprint))
        transport: httpx.BaseTransport = httpx.HTTPTransport(
            verify=context, trust_env=False, limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_S)
        )
        self._http = httpx.Client(
            base_url=access.url,
            transport=transport if through is None else through(transport),
            trust_env=False,
            timeout=ANSWER_S,
            headers={"Authorization": f"Bearer {access.token}", "Accept-Encoding": "identity"},
        )

    def model_files(self) -> list[dict[str, Any]]:
        """``{"name", "size", "sha256"}`` of each file of the model."""
        return list(self.ask("GET", "/model", read_s=_LISTING_S, extensions={"received": "model"}).json())

    def ranges(self, file: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of ``ranges`` (pairs of offset and length) of a model file, joined, in chunks as they come.

        Raises:
            PotluckError: the other side sent fewer or more bytes than asked for.
        """
        for start in range(0, len(ranges), _RANGES):
            yield from self._some_ranges(file, list(ranges[start : start + _RANGES]))

    def ask(
        self,
        method: str,
        path: str,
        body: Content | None = None,
        *,
        read_s: float = ANSWER_S,
        accept: tuple[int, ...] = (),
        headers: Mapping[str, str] | None = None,
        extensions: Mapping[str, Any] | None = None,
    ) -> httpx.Response:
        """The answer to a request, which is repeated while the network fails.

        Args:
            method: of HTTP.
            path: with the query.
            body: sent with it; of a file, never all in memory.
            read_s: how long the other side may be silent before that counts as a failure of the network.
            accept: statuses that are no error here, beside success.
            headers: of this request only.
            extensions: told to the transport.
        """

        with _opened(body) as content:

            def attempt() -> httpx.Response:
                if isinstance(content, BufferedReader):
                    content.seek(0)
                return self._http.request(
                    method,
                    path,
                    content=content,
                    headers=headers,
                    timeout=httpx.Timeout(ANSWER_S, read=read_s),
                    extensions=None if extensions is None else dict(extensions),
                )

            response = self._patiently(attempt)
        if response.status_code not in accept:
            self._check(response)
        return response

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _some_ranges(self, file: str, left: list[tuple[int, int]]) -> Iterator[bytes]:
        def asking() -> dict[str, Any]:
            return {"json": {"file": file, "ranges": left}}

        for chunk in self.streamed("POST", "/model/ranges", asking, {"received": "model"}):
            left = without_first(left, len(chunk))
            yield chunk
        if any(length for _, length in left):
            raise PotluckError(f"{self._other_side} sent less of {file} than was asked for.")

    def streamed(
        self, method: str, path: str, asking: Callable[[], dict[str, Any]], extensions: Mapping[str, Any]
    ) -> Iterator[bytes]:
        """An answer in chunks as they come; where it breaks, ``asking`` says how what is left is asked for.

        Each chunk that comes renews the patience.

        Args:
            method: of HTTP.
            path: with the query.
            asking: the request's body or headers, as :meth:`httpx.Client.stream` takes them.
            extensions: told to the transport.
        """
        first_failure: float | None = None
        while True:
            try:
                with self._http.stream(method, path, extensions=dict(extensions), **asking()) as response:
                    if response.status_code >= 300:
                        response.read()
                        self._check(response)
                    for chunk in response.iter_raw():
                        first_failure = None
                        yield chunk
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
                f"{self._other_side} does not answer (any more): it ended, or the network between is "
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
            message = f"{self._other_side} failed with HTTP status {response.status_code}."
        raise (BadInput if response.status_code < 500 else PotluckError)(message)


@contextmanager
def _opened(body: Content | None) -> Iterator[bytes | BufferedReader | None]:
    """What is sent for ``body``."""
    if isinstance(body, Path):
        try:
            file = body.open("rb")
        except OSError as error:
            raise BadInput(f"{body} cannot be read: {error.strerror}.") from None
        with file:
            yield file
    else:
        yield json.dumps(body).encode() if isinstance(body, Mapping) else body


def without_first(ranges: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """What is left of ``ranges`` when their first ``count`` bytes are there."""
    for i, (offset, length) in enumerate(ranges):
        if count < length:
            return [(offset + count, length - count), *ranges[i + 1 :]]
        count -= length
    return []
