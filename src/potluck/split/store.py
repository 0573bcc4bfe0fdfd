"""The server's directory of contributions: shards by their digest, manifests that make them whole, clients.

``shards/SHA256.safetensors``, ``contributions/ID.json``, ``clients/KEY.json``, ``holders/KEY/SHA256`` (an empty file:
this client sent that shard) and ``incoming/``. A file gets its name when its content is on the disk, so that another
process may read the store at any time.
"""

import fcntl
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from potluck.errors import BadInput
from potluck.models.durable import move_durably, saving, sync, write_durably
from potluck.split.agreement import (
    RECORD_PARTS,
    Manifest,
    Shard,
    contribution_id,
    differences,
    parse_manifest,
)
from potluck.split.check import Limits, ShardInfo, check_shard, shard_info
from potluck.split.shard_file import SHARD_BYTES, ShardFile, shard_path


class Store:
    """A directory of contributions; made if it is not there.

    One process may change it (see :meth:`serving`), from several threads; others read.
    """

    def __init__(self, directory: Path) -> None:
        """Open a store.

        Raises:
            BadInput: the directory cannot be made.
            SaveFailed: the disk is full.
        """
        self.directory = directory
        self._incoming = directory / "incoming"
        self._shards = directory / "shards"
        self._contributions = directory / "contributions"
        self._clients = directory / "clients"
        self._holders = directory / "holders"
        self._lock = threading.Lock()
        self._names: dict[str, str] = {}
        """Of clients, by the digest of their key; as far as they were asked for."""
        try:
            with saving(directory):
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)  # whoever reads it can read the texts
                for part in (self._incoming, self._shards, self._contributions, self._clients, self._holders):
                    part.mkdir(exist_ok=True)
        except OSError as error:
            raise BadInput(f"{directory} cannot be a store of contributions: {error.strerror}.") from None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Be the one process that changes the store; what a server before left half received is removed.

        Shards that no contribution names stay: their client may go on.

        Raises:
            BadInput: another process serves this store.
        """
        with self._alone("serving.lock", f"Another server uses {self.directory}: stop it, or name another store."):
            for left in self._incoming.iterdir():
                left.unlink()
            yield

    @contextmanager
    def training(self) -> Iterator[None]:
        """Be the one training over this store; a server and clients may go on meanwhile.

        Raises:
            BadInput: another training is going on.
        """
        with self._alone("training.lock", f"Another training uses {self.directory}: wait until it is done."):
            yield

    def register(self, name: str, key_digest: str) -> None:
        """Take a client in, or know it again.

        Args:
            name: what it calls itself; upper and lower case are the same name.
            key_digest: SHA-256, hexadecimal, of the key that only this client has.

        Raises:
            BadInput: another client has the name, or this key another name.
            SaveFailed: the disk is full.
        """
        with self._lock:
            path = self._clients / f"{_key_of(name)}.json"
            if path.exists() and json.loads(path.read_bytes())["key_digest"] != key_digest:
                raise BadInput(f"Another client is called {name} here: choose another name.")
            if (other := self.client(key_digest)) == name:
                return
            if other is not None:
                raise BadInput(f"This client is called {other} here, not {name}: use that name.")
            content = json.dumps({"name": name, "key_digest": key_digest}).encode()
            write_durably(path, content, self._incoming)

    def client(self, key_digest: str) -> str | None:
        """The name of the client whose key has this digest; None for a stranger."""
        if key_digest not in self._names:
            known = [json.loads(path.read_bytes()) for path in self._clients.glob("*.json")]
            self._names = {client["key_digest"]: client["name"] for client in known}
        return self._names.get(key_digest)

    def missing(self, digests: Sequence[str]) -> list[str]:
        """Those of the shards that are not here yet, each once, in the order given."""
        return [sha256 for sha256 in dict.fromkeys(digests) if not self._shard(sha256).exists()]

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """A path to receive one shard at, for :meth:`accept`; whatever is left there is removed.

        Raises:
            SaveFailed: the disk filled up inside the block.
        """
        path = self._incoming / secrets.token_hex(16)
        try:
            with saving(self.directory):
                yield path
        finally:
            path.unlink(missing_ok=True)

    def accept(self, received: Path, sha256: str, limits: Limits, client: str) -> ShardInfo:
        """Check a received shard and take it in; it is on the disk when this returns. Twice is as good as once.

        Args:
            received: where it lies, from :meth:`incoming`.
            sha256: what the client says its content has.
            limits: what this server accepts.
            client: the name of who sent it.

        Raises:
            BadInput: the content has another digest, or is refused by :func:`check_shard`; nothing was kept.
            SaveFailed: the disk is full.
        """
        size = received.stat().st_size
        if size > SHARD_BYTES:
            raise BadInput(f"The shard has {size} bytes; at most {SHARD_BYTES} are taken.")
        with received.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        if digest != sha256:
            raise BadInput(f"What arrived as shard {sha256[:12]} has SHA-256 {digest[:12]}: send it again.")
        info = check_shard(received, limits)
        with self._lock, saving(self.directory):
            self._hold(client, [sha256])
            if not self._shard(sha256).exists():
                move_durably(received, self._shard(sha256))
        return info

    def commit(self, manifest: Manifest, client: str, limits: Limits) -> str:
        """Make a contribution whole; its id. It is on the disk when this returns. Twice is as good as once.

        Raises:
            BadInput: it is not this client's; for another agreement (says what differs); a shard is missing or is not
                what the manifest says; it has nothing to train on; a target lies outside its table.
            SaveFailed: the disk is full.
        """
        if client != manifest.client:
            raise BadInput(f"This contribution says it is from {manifest.client}, which is another client.")
        if (told := differences(limits.agreement, manifest.agreement)) is not None:
            raise BadInput(told)
        with self._lock:
            self._check(manifest, limits)
            identity = contribution_id(manifest)
            path = self._contributions / f"{identity}.json"
            content = manifest.to_json()
            if not path.exists() or path.read_bytes() != content:
                with saving(self.directory):
                    self._hold(manifest.client, [shard.sha256 for shard in manifest.shards])
                    write_durably(path, content, self._incoming)
            return identity

    def contributions(self) -> list[Manifest]:
        """All that were committed, ordered by client and id.

        Raises:
            BadInput: a manifest was damaged.
        """
        found: list[tuple[str, str, Manifest]] = []
        for path in self._contributions.glob("*.json"):
            try:
                manifest = parse_manifest(path.read_bytes())
            except FileNotFoundError:
                continue  # withdrawn meanwhile
            except BadInput as error:
                raise BadInput(f"{path} is damaged: {error}") from None
            found.append((manifest.client, path.stem, manifest))
        return [manifest for _, _, manifest in sorted(found, key=lambda entry: entry[:2])]

    def shard(self, sha256: str) -> ShardFile:
        """A shard, opened.

        Raises:
            BadInput: it is gone or damaged.
        """
        return ShardFile(self._shard(sha256))

    def withdraw(self, client: str) -> int:
        """Delete all that a client contributed or sent, except shards that others sent too; how many contributions.

        Broken off in the middle, it is finished by the next call. The client may contribute again.
        """
        with self._lock:
            whole = self.contributions()
            theirs = [manifest for manifest in whole if manifest.client == client]
            for manifest in theirs:
                (self._contributions / f"{contribution_id(manifest)}.json").unlink(missing_ok=True)
            sync(self._contributions)
            mine = self._holders / _key_of(client)
            held = {path.name for path in mine.iterdir()} if mine.exists() else set()
            kept = {shard.sha256 for manifest in whole if manifest.client != client for shard in manifest.shards}
            for sha256 in held:
                if sha256 not in kept and not any(
                    (other / sha256).exists() for other in self._holders.iterdir() if other != mine
                ):
                    self._shard(sha256).unlink(missing_ok=True)
            sync(self._shards)
            for sha256 in held:
                (mine / sha256).unlink(missing_ok=True)
            return len(theirs)

    @contextmanager
    def _alone(self, name: str, sentence: str) -> Iterator[None]:
        with (self.directory / name).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(sentence) from None
            yield

    def _shard(self, sha256: str) -> Path:
        return shard_path(self._shards, sha256)

    def _hold(self, client: str, digests: Collection[str]) -> None:
        """Note that a client sent these, so that they can be deleted when it withdraws."""
        directory = self._holders / _key_of(client)
        if not directory.exists():
            directory.mkdir()
            sync(self._holders)
        new = [sha256 for sha256 in digests if not (directory / sha256).exists()]
        for sha256 in new:
            os.close(os.open(directory / sha256, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        if new:
            sync(directory)

    def _check(self, manifest: Manifest, limits: Limits) -> None:
        if missing := self.missing([shard.sha256 for shard in manifest.shards]):
            raise BadInput(
                f"{len(missing)} shards of the contribution are missing, {missing[0][:12]} first: send them."
            )
        if not any(shard.part == "train" for shard in manifest.shards):
            raise BadInput("The contribution is empty: it has no shard of examples to train on.")
        highest = -1
        for listed in manifest.shards:
            with self.shard(listed.sha256) as shard:
                info = shard_info(shard, limits)
            _compare(listed, info)
            highest = max(highest, info.max_index)
        rows = sum(shard.rows for shard in manifest.shards if shard.part == "table")
        if limits.agreement.targets == "embeddings" and highest >= rows:
            raise BadInput(f"A target has index {highest}, but the contribution's table has {rows} rows.")


def _compare(listed: Shard, info: ShardInfo) -> None:
    fields = ["bytes", "part", "rows"] + (["examples", "tokens", "targets"] if info.part in RECORD_PARTS else [])
    for field in fields:
        if (said := getattr(listed, field)) != (found := getattr(info, field)):
            raise BadInput(f"Shard {listed.sha256[:12]} has {found} as {field}, not {said} as its manifest says.")


def _key_of(client: str) -> str:
    """A file name for a client, whatever letters its name has."""
    return hashlib.sha256(client.casefold().encode()).hexdigest()[:32]
