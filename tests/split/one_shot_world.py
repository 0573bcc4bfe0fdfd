"""A split server in a thread, clients of it, and what passes between them."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from split_doors import LOCAL

from potluck.job import Job
from potluck.split.client import Client, Contributed, contribute
from potluck.split.listener import SplitListener
from potluck.split.result import Outcome
from potluck.split.serve import Serving, serve
from potluck.split.traffic import Traffic

SOON_S = 60.0


class Told(SplitListener):
    """Keeps what it is told; ``stop`` is asked at each progress."""

    def __init__(self, stop: Callable[[str, int], bool] = lambda what, done: False) -> None:
        self.stop = stop
        self.texts: list[str] = []
        self.progressed: list[tuple[str, int, int]] = []
        self.invite = ""
        self.served = threading.Event()

    def tell(self, text: str) -> None:
        self.texts.append(text)

    def invited(self, invite: str, scheme: str) -> None:
        self.invite = invite
        self.served.set()

    def progress(self, what: str, done: int, total: int) -> None:
        self.progressed.append((what, done, total))
        if self.stop(what, done):
            raise KeyboardInterrupt

    def said(self, text: str) -> bool:
        return any(text in each for each in self.texts)


@dataclass
class Served:
    told: Told
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def invite(self) -> str:
        return self.told.invite


@contextmanager
def served(job: Job, home: Path, **serving: Any) -> Iterator[Served]:
    """The server until the block ends; what ended it by itself is raised here."""
    running, ended, failed = Served(Told()), threading.Event(), []

    def until(outcome: Outcome | None) -> bool:
        if outcome is not None and not running.outcomes:
            running.outcomes.append(outcome)
        return ended.is_set()

    def run() -> None:
        try:
            serve(job, Serving(address=LOCAL, home=home / "server", **serving), listener=running.told, until=until)
        except BaseException as error:
            failed.append(error)
        running.told.served.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert running.told.served.wait(SOON_S)
        if failed:
            raise failed[0]
        yield running
    finally:
        ended.set()
        thread.join(SOON_S)
        assert not thread.is_alive()
    if failed:
        raise failed[0]


def rows_file(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def give(invite: str, home: Path, name: str, data: Path, **options: Any) -> Contributed:
    """Contribute as ``name``; ``traffic``, ``listener``, ``output`` and ``overwrite`` are no options of a client."""
    call = {key: options.pop(key) for key in ("traffic", "listener", "output", "overwrite") if key in options}
    return contribute(invite, [str(data)], client_of(home, name, **options), **call)


def client_of(home: Path, name: str, **options: Any) -> Client:
    return Client(name=name, home=home / "clients-home", **{"spool": home / "spool", "patience_s": 5.0, **options})


@dataclass
class Sent:
    method: str
    path: str
    headers: bytes
    body: bytes


class Recording(Traffic):
    """Keeps every request as it leaves the client: address, headers and body."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Sent] = []

    def over(self, transport: httpx.BaseTransport) -> httpx.BaseTransport:
        return _Recorded(super().over(transport), self.requests)

    @property
    def everything(self) -> bytes:
        return b"\n".join(part for r in self.requests for part in (r.path.encode(), r.headers, r.body))

    def ranges(self) -> list[tuple[str, list[tuple[int, int]]]]:
        """What was asked of the model's files: name and ``(offset, length)``."""
        asked = [json.loads(r.body) for r in self.requests if r.path == "/model/ranges"]
        return [(each["file"], [tuple(run) for run in each["ranges"]]) for each in asked]


class _Recorded(httpx.BaseTransport):
    def __init__(self, inner: httpx.BaseTransport, requests: list[Sent]) -> None:
        self._inner, self._requests = inner, requests

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        assert isinstance(request.stream, httpx.SyncByteStream)
        body = b"".join(request.stream)
        headers = b"\n".join(name + b": " + value for name, value in request.headers.raw)
        self._requests.append(Sent(request.method, request.url.raw_path.decode(), headers, body))
        return self._inner.handle_request(
            httpx.Request(
                request.method,
                request.url,
                headers=request.headers,
                stream=httpx.ByteStream(body),
                extensions=request.extensions,
            )
        )

    def close(self) -> None:
        self._inner.close()
