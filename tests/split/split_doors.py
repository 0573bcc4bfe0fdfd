"""A split server over a folder, for tests of what passes between clients and it."""

import hashlib
import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from potluck.control.files import ModelFile, ModelFiles
from potluck.control.identity import Identity
from potluck.control.invite import Invite
from potluck.errors import BadInput
from potluck.split.door import SplitDoor
from potluck.split.routes import Result
from potluck.split.uplink import Uplink

LOCAL = "127.0.0.1"
SECRET = "the invite's secret"


class FolderBackend:
    """Keeps what it is told in a folder; a step's answer is what the test gives, or its body reversed."""

    takes_steps = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("shards", "incoming", "result"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self.known = folder / "clients.json"
        self.steps: list[tuple[str, int, bytes]] = []
        self.answers: dict[int, Future[bytes]] = {}
        self.heard: list[str] = []
        self._lock = threading.Lock()

    def clients(self) -> dict[str, str]:
        return dict(json.loads(self.known.read_text())) if self.known.exists() else {}

    def register(self, name: str, key_digest: str) -> None:
        with self._lock:
            clients = self.clients()
            if clients.setdefault(name, key_digest) != key_digest:
                raise BadInput(f"Another client is called {name}: take another name with --name.")
            self.known.write_text(json.dumps(clients))

    def client(self, key_digest: str) -> str | None:
        return next((name for name, digest in self.clients().items() if digest == key_digest), None)

    def terms(self, client: str) -> dict[str, Any]:
        return {"you": client, "cut": 2}

    def missing(self, client: str, shas: list[str]) -> list[str]:
        return [sha for sha in shas if not (self.folder / "shards" / sha).exists()]

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        path = self.folder / "incoming" / secrets.token_hex(8)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def accept(self, client: str, path: Path, sha256: str) -> None:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                raise BadInput("The shard's bytes are not those of its name.")
        path.replace(self.folder / "shards" / sha256)

    def commit(self, client: str, contribution: str, manifest: dict[str, Any]) -> None:
        if missing := self.missing(client, manifest["shards"]):
            raise BadInput(f"{len(missing)} shards are missing.")
        (self.folder / f"{client}.{contribution}").write_text(json.dumps(manifest))

    def withdraw(self, client: str) -> None:
        for path in self.folder.glob(f"{client}.*"):
            path.unlink()

    def result(self) -> Result | None:
        directory = self.folder / "result"
        files = [
            ModelFile(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
            for path in sorted(directory.iterdir())
        ]
        return Result("trained", directory, tuple(files)) if files else None

    def step(self, client: str, number: int, body: bytes) -> Future[bytes]:
        self.steps.append((client, number, body))
        answer = self.answers.get(number)
        if answer is None:
            answer = Future()
            answer.set_result(body[::-1])
        return answer

    def alive(self, client: str) -> None:
        self.heard.append(client)


@contextmanager
def open_split(folder: Path, port: int = 0, slice_s: float = 10.0) -> Iterator[tuple[SplitDoor, FolderBackend]]:
    """A server that may be opened again over the same folder, with the same identity."""
    model = folder / "model"
    if not model.exists():
        model.mkdir(parents=True)
        (model / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
        (model / "config.json").write_text("{}")
    backend = FolderBackend(folder / "store")
    identity, files = Identity.load(folder / "identity"), ModelFiles(model, folder / "digests")
    with SplitDoor(identity, LOCAL, port, SECRET, backend, files, slice_s=slice_s) as door:
        yield door, backend


def hello(invite: Invite, name: str = "cam-1", key: str = "k" * 43, **options: Any) -> Uplink:
    return Uplink.open(invite, name, key, **{"patience_s": 1.0, **options})


def shard(folder: Path, content: bytes) -> tuple[Path, str]:
    sha256 = hashlib.sha256(content).hexdigest()
    (folder / sha256).write_bytes(content)
    return folder / sha256, sha256


def stranger(door: SplitDoor, token: str | None = None) -> httpx.Client:
    """A client that trusts anybody and shows ``token``."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.Client(base_url=door.url, verify=False, trust_env=False, headers=headers)
