"""A model that lies elsewhere: a directory whose files fill up with the bytes that are needed, and no others.

A file of the cache is named by the SHA-256 of its whole content and has its full size from the start, as a sparse
file; beside it stands which of its bytes are present. These are on the disk before they are listed, so what a crash
leaves behind is never taken for weights. Devices of one machine share the cache.
"""

import hashlib
import os
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from potluck.errors import BadInput, PotluckError, SaveFailed
from potluck.models.cache import user_cache
from potluck.models.durable import FULL, locked
from potluck.models.intervals import Intervals, checked, from_runs, size, to_runs, union, without

Fetch = Callable[[str, list[tuple[int, int]]], Iterator[bytes]]
"""Gives the bytes of runs ``(offset, length)`` of a named file, joined, in chunks of any size."""

_SHA256 = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w-][\w.-]*")
_NOTHING = from_runs([])


@dataclass
class _File:
    name: str
    size: int
    sha256: str
    data: Path
    present: Intervals = field(default_factory=lambda: _NOTHING)
    """As last seen in the sidecar; never more than is there."""

    @property
    def sidecar(self) -> Path:
        return self.data.with_suffix(".present.npy")


class Fetched:
    """The files of one model in the cache; threads and processes may use the same ones at the same time.

    ``directory`` looks like the model's own: open it with ``Checkpoint.open(fetched.directory, fetched.need)`` after
    ``fetch_small``.
    """

    def __init__(self, cache_root: Path | None, files: Sequence[Mapping[str, Any]], fetch: Fetch) -> None:
        """Lay out the directory; nothing is fetched yet.

        Args:
            cache_root: kept between runs; ``model`` in the user's cache directory if None.
            files: ``{"name", "size", "sha256"}`` of each file.
            fetch: called with what is missing.

        Raises:
            BadInput: the list of files cannot be used.
            SaveFailed: the cache cannot be written.
        """
        root = cache_root or user_cache() / "model"
        self._fetch = fetch
        self._lock = threading.Lock()
        self._bytes_fetched = 0
        self._files = {file.name: file for file in _checked_files(files, root / "content")}
        self.directory = root / "models" / _digest_of(self._files.values())
        with _sentences(root):
            (root / "content").mkdir(parents=True, exist_ok=True)
            self.directory.mkdir(parents=True, exist_ok=True)
            for file in self._files.values():
                with locked(file.data.with_suffix(".lock"), 0o666):
                    _prepare(file)
                link = self.directory / file.name
                if not link.is_symlink():
                    _link(link, Path("..") / ".." / "content" / file.data.name)

    @property
    def bytes_fetched(self) -> int:
        """Bytes fetched since this object was made."""
        return self._bytes_fetched

    def need(self, file: Path | str, runs: Sequence[tuple[int, int]]) -> None:
        """Make runs ``(offset, length)``, in bytes, of a file present; what is there already is not fetched again.

        Raises:
            BadInput: there is no such file, or a run lies outside it.
            SaveFailed: the disk is full.
            PotluckError: fewer or more bytes came than were asked for.
        """
        known = self._find(Path(file).name)
        wanted = from_runs(runs)
        if len(wanted) and (wanted[0, 0] < 0 or wanted[-1, 1] > known.size):
            raise BadInput(f"Bytes {wanted[0, 0]} to {wanted[-1, 1]} lie outside {known.name}, which has {known.size}.")
        if len(without(wanted, known.present)) == 0:
            return
        with _sentences(known.data.parent), locked(known.data.with_suffix(".lock"), 0o666):
            known.present = _read_sidecar(known)
            missing = without(wanted, known.present)
            if len(missing):
                self._fill(known, missing)
                _mark(known, union(known.present, missing))

    def whole(self, name: str) -> Path:
        """Make a whole file present and compare its digest; where it lies.

        Raises:
            BadInput: there is no such file, or what came is not what was announced.
            SaveFailed: the disk is full.
        """
        known = self._find(name)
        self.need(name, [(0, known.size)])
        with known.data.open("rb") as handle:
            found = hashlib.file_digest(handle, "sha256").hexdigest()
        if found != known.sha256:
            with _sentences(known.data.parent), locked(known.data.with_suffix(".lock"), 0o666):
                _mark(known, _NOTHING)
            raise BadInput(
                f"{name} did not arrive as it was announced: its SHA-256 is {found[:12]} and not {known.sha256[:12]}. "
                "Was the model changed on the coordinator? Start again."
            )
        return self.directory / name

    def fetch_small(self) -> None:
        """Everything but the weights: configuration, tokenizer, chat template, the index of shards.

        Raises:
            BadInput, SaveFailed: as :meth:`whole`.
        """
        for name in self._files:
            if not name.endswith(".safetensors"):
                self.whole(name)

    def _find(self, name: str) -> _File:
        known = self._files.get(name)
        if known is None:
            raise BadInput(f"{name} is no file of this model, which has {', '.join(sorted(self._files))}.")
        return known

    def _fill(self, file: _File, missing: Intervals) -> None:
        runs = to_runs(missing)
        descriptor = os.open(file.data, os.O_WRONLY | os.O_CLOEXEC)
        try:
            places = iter(runs)
            at, room = next(places)
            count = 0
            for chunk in self._fetch(file.name, runs):
                left = memoryview(chunk)
                while left:
                    if room == 0:
                        at, room = next(places, (0, 0))
                        if room == 0:
                            raise PotluckError(f"More of {file.name} came than was asked for.")
                    written = os.pwrite(descriptor, left[:room], at)
                    at, room, left = at + written, room - written, left[written:]
                    count += written
            if count != size(missing):
                raise PotluckError(f"{count} bytes of {file.name} came instead of {size(missing)}.")
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)
        with self._lock:
            self._bytes_fetched += count


def _checked_files(files: Sequence[Mapping[str, Any]], content: Path) -> Iterator[_File]:
    """The listing came over the network: names become paths, so they must be plain names."""
    for entry in files:
        name, length, sha256 = entry.get("name"), entry.get("size"), entry.get("sha256")
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise BadInput(f"{name!r} is no name for a file of a model.")
        if not (isinstance(length, int) and length >= 0 and isinstance(sha256, str) and _SHA256.fullmatch(sha256)):
            raise BadInput(f"{name} of the model is announced without a size and a SHA-256.")
        yield _File(name, length, sha256, content / sha256)


def _digest_of(files: Any) -> str:
    listing = "\n".join(sorted(f"{file.sha256} {file.size} {file.name}" for file in files))
    return hashlib.sha256(listing.encode()).hexdigest()[:32]


def _prepare(file: _File) -> None:
    """A sparse file of full size; one of another size holds nothing."""
    if not file.data.is_file() or file.data.stat().st_size != file.size:
        file.sidecar.unlink(missing_ok=True)
        with file.data.open("wb") as handle:
            handle.truncate(file.size)
    file.present = _read_sidecar(file)


def _read_sidecar(file: _File) -> Intervals:
    try:
        found = checked(np.load(file.sidecar, allow_pickle=False), file.size)
    except (OSError, ValueError, EOFError):
        found = None
    return _NOTHING if found is None else found


def _mark(file: _File, present: Intervals) -> None:
    partial = file.sidecar.with_name(f".{file.sidecar.name}.{secrets.token_hex(4)}")
    try:
        # not synced: what a crash leaves of it is told from a whole one when it is read, and then nothing is present
        with partial.open("wb") as handle:
            np.save(handle, present, allow_pickle=False)
        partial.replace(file.sidecar)
    finally:
        partial.unlink(missing_ok=True)
    file.present = present


def _link(link: Path, target: Path) -> None:
    """A symlink that is there at once or not at all; another process may make the same one."""
    partial = link.with_name(f".{link.name}.{secrets.token_hex(4)}")
    partial.symlink_to(target)
    partial.replace(link)


@contextmanager
def _sentences(where: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise SaveFailed(f"The disk of {where} is full: make room for this device's part of the model.") from error
        raise SaveFailed(f"The model cannot be kept in {where}: {error.strerror or error}.") from error
