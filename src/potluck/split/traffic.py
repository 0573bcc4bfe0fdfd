"""What passed over a connection, by kind of message and direction, and a link of a given rate in its place."""

import threading
import time
from collections.abc import Iterator, Mapping

import httpx

_OTHER = "other"
_PIECE_BYTES = 16 << 10
_BURST_S = 0.02


class Traffic:
    """Counts the bytes of bodies; with a rate, lets them through no faster, in each direction for itself.

    A request's extension ``sent`` states the bytes of each kind in its body, in order, and counts what is over as
    ``other``; its extension ``received`` names the kind of the answer. A request that is repeated counts each time.
    Headers and TLS are not counted.
    """

    def __init__(self, link_mbit: float | None = None) -> None:
        """``link_mbit``: 10^6 bits a second in each direction; None for what the real link gives."""
        self._lock = threading.Lock()
        self._sent: dict[str, int] = {}
        self._received: dict[str, int] = {}
        self.up, self.down = (None if link_mbit is None else Rate(link_mbit) for _ in range(2))

    def count(self, kind: str, *, sent: int = 0, received: int = 0) -> None:
        """Add bytes of a kind."""
        with self._lock:
            for counters, size in ((self._sent, sent), (self._received, received)):
                if size:
                    counters[kind] = counters.get(kind, 0) + size

    @property
    def sent(self) -> int:
        """Bytes of all kinds, from the client to the server."""
        with self._lock:
            return sum(self._sent.values())

    @property
    def received(self) -> int:
        """Bytes of all kinds, from the server to the client."""
        with self._lock:
            return sum(self._received.values())

    def to_json(self) -> dict[str, dict[str, int]]:
        """``{"sent": {kind: bytes}, "received": {kind: bytes}}``."""
        with self._lock:
            return {"sent": dict(self._sent), "received": dict(self._received)}

    def over(self, transport: httpx.BaseTransport) -> httpx.BaseTransport:
        """The transport, counted and slowed."""
        return _Metered(transport, self)


class Rate:
    """A token bucket of 20 ms: on average never faster than its rate, whatever sleeping takes too long."""

    def __init__(self, mbit: float) -> None:
        self._bytes_a_second = mbit * 1e6 / 8
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, size: int) -> None:
        """Return when ``size`` bytes have passed, after all that came before."""
        with self._lock:
            start = max(self._free_at, time.monotonic() - _BURST_S)
            self._free_at = free_at = start + size / self._bytes_a_second
        time.sleep(max(0.0, free_at - time.monotonic()))


class _Metered(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport, traffic: Traffic) -> None:
        self._inner = inner
        self._traffic = traffic

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        told = request.extensions
        response = self._inner.handle_request(
            httpx.Request(
                request.method,
                request.url,
                headers=request.headers,
                stream=_Upload(request.stream, self._traffic, told.get("sent", {})),
                extensions=told,
            )
        )
        assert isinstance(response.stream, httpx.SyncByteStream)
        response.stream = _Download(response.stream, self._traffic, str(told.get("received", _OTHER)))
        return response

    def close(self) -> None:
        self._inner.close()


class _Upload(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, traffic: Traffic, kinds: Mapping[str, int]) -> None:
        self._inner = inner
        self._traffic = traffic
        self._left = dict(kinds)

    def __iter__(self) -> Iterator[bytes]:
        for piece in _pieces(self._inner):
            if self._traffic.up is not None:
                self._traffic.up.take(len(piece))
            self._count(len(piece))
            yield piece

    def _count(self, size: int) -> None:
        for kind, left in self._left.items():
            part = min(left, size)
            self._traffic.count(kind, sent=part)
            self._left[kind] -= part
            size -= part
        self._traffic.count(_OTHER, sent=size)

    def close(self) -> None:
        self._inner.close()


class _Download(httpx.SyncByteStream):
    def __init__(self, inner: httpx.SyncByteStream, traffic: Traffic, kind: str) -> None:
        self._inner = inner
        self._traffic = traffic
        self._kind = kind

    def __iter__(self) -> Iterator[bytes]:
        for piece in _pieces(self._inner):
            if self._traffic.down is not None:
                self._traffic.down.take(len(piece))
            self._traffic.count(self._kind, received=len(piece))
            yield piece

    def close(self) -> None:
        self._inner.close()


def _pieces(stream: httpx.SyncByteStream) -> Iterator[bytes]:
    for chunk in stream:
        for start in range(0, len(chunk), _PIECE_BYTES):
            yield chunk[start : start + _PIECE_BYTES]
