"""The files of a model that a coordinator hands out by byte ranges, and their digests."""

import hashlib
import json
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from potluck.errors import BadInput
from potluck.models.cache import user_cache
from potluck.models.shards import BESIDE_WEIGHTS, INDEX_FILE, shard_files

_CHUNK_BYTES = 1 << 20


class ModelFile(NamedTuple):
    """One file: its name in the model's directory, its bytes, and the SHA-256 of its content in hexadecimal."""

    name: str
    size: int
    sha256: str


class ModelFiles:
    """The configuration, tokenizer and weights in a model's directory, and nothing else that lies there.

    A file must stay as it is while it is handed out.
    """

    def __init__(self, directory: Path, cache: Path | None = None) -> None:
        self._directory = directory
        self._cache = cache or user_cache() / "digests"
        self._lock = threading.Lock()
        self._stamps: dict[str, tuple[int, int]] = {}
        self._files: dict[str, ModelFile] = {}

    def listing(self) -> tuple[ModelFile, ...]:
        """All files with their digests. The first call reads every byte, unless the digests are in the cache.

        Raises:
            BadInput: there are no weights, or a file cannot be read.
        """
        with self._lock:
            if not self._files:
                beside = (path.name for pattern in BESIDE_WEIGHTS for path in self._directory.glob(pattern))
                for name in sorted({*beside, *shard_files(self._directory), INDEX_FILE}):
                    path = self._directory / name
                    if path.is_file():
                        self._stamps[name] = _stamp(path)
                        self._files[name] = ModelFile(name, self._stamps[name][0], self._digest(path))
            return tuple(self._files.values())

    def check(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """See whether ``ranges``, pairs of offset and length, may be read; their bytes together.

        Raises:
            BadInput: the file is not listed, a range lies outside it, or the file was changed.
        """
        self.listing()
        file = self._files.get(name)
        if file is None:
            raise BadInput(f"{name} is no file of this model.")
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > file.size:
                raise BadInput(f"Bytes {offset} to {offset + length} lie outside {name}, which has {file.size}.")
        path = self._directory / name
        if not path.is_file() or _stamp(path) != self._stamps[name]:
            raise BadInput(f"{path} was changed during the training: leave the model's files as they are.")
        return sum(length for _, length in ranges)

    def read(self, name: str, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of ``ranges`` (see :meth:`check`), joined, in chunks of at most 1 MiB; opened on first use.

        Raises:
            BadInput: the file ended early.
        """
        descriptor = os.open(self._directory / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            chunk = bytearray()
            for offset, length in ranges:
                while length:
                    part = os.pread(descriptor, min(length, _CHUNK_BYTES - len(chunk)), offset)
                    if not part:
                        raise BadInput(f"{self._directory / name} ended while it was read.")
                    chunk += part
                    offset, length = offset + len(part), length - len(part)
                    if len(chunk) == _CHUNK_BYTES:
                        yield bytes(chunk)
                        chunk.clear()
            if chunk:
                yield bytes(chunk)
        finally:
            os.close(descriptor)

    def _digest(self, path: Path) -> str:
        key = json.dumps([str(path.resolve()), *_stamp(path)])
        kept = self._cache / hashlib.sha256(key.encode()).hexdigest()
        try:
            found = kept.read_text(encoding="ascii")
            if len(found) == 64:
                return found
        except (OSError, ValueError):
            pass  # not there, or damaged: made again
        try:
            with path.open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as error:
            raise BadInput(f"{path} cannot be read: {error.strerror}.") from None
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            partial = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}")
            partial.write_text(digest, encoding="ascii")
            partial.replace(kept)
        except OSError:
            pass  # only the next start is slower for it
        return digest


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns
