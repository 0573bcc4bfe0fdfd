"""Slices of a safetensors checkpoint, read so that memory grows by the slice and by nothing else.

Every read is a ``pread`` into the tensor it returns: pages of a memory map count as resident memory of every device,
and one map of the whole file soon holds several times the bytes a device asked for.
"""

import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.models.prefixes import with_prefix
from potluck.models.shards import INDEX_FILE, Need, Stored, read_header, shard_files

_CONVERT_BYTES = 4 << 20  # bytes in flight while a tensor is converted to another dtype
_FETCHED_AT_ONCE = 64 << 20  # what an interruption may lose

Part = tuple[str, Ranges | None, Ranges | None]
"""A tensor's name, and its rows and columns; None for all of them."""


class Checkpoint:
    """The tensors of a directory in Hugging Face layout; one file or sharded with an index.

    Ranks that are threads may share one: reads are positional, and the byte counter is locked.
    """

    def __init__(
        self, directory: Path, stored: dict[str, Stored], descriptors: list[int], need: Need | None = None
    ) -> None:
        self.directory = directory
        self._need = need
        self._stored = stored
        self._descriptors = descriptors
        self._bytes_read = 0
        self._lock = threading.Lock()

    @classmethod
    def open(cls, directory: Path, need: Need | None = None) -> Self:
        """Read the headers of all shards; no tensor is read yet.

        ``need`` is called with a file and its runs ``(offset, length)``, in bytes, before those are read.

        Raises:
            BadInput: there is no safetensors checkpoint, a shard is missing, cut short or not what the index says.
        """
        expected = shard_files(directory, need)
        descriptors: list[int] = []
        stored: dict[str, Stored] = {}
        try:
            for file, names in expected.items():
                path = directory / file
                try:
                    descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                except FileNotFoundError:
                    raise BadInput(f"{path} is missing: the checkpoint's index names it. Copy it there.") from None
                except OSError as error:
                    raise BadInput(f"{path} cannot be read: {error.strerror}.") from None
                found = read_header(path, descriptors[-1], need)
                for name in found if names is None else names:
                    if name not in found:
                        raise BadInput(f"{path} does not hold {name}, although {INDEX_FILE} says so.")
                    stored[name] = found[name]
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return cls(directory, with_prefix(stored, directory), descriptors, need)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, sorted."""
        return tuple(sorted(self._stored))

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors read from disk so far, headers not counted."""
        return self._bytes_read

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor.

        Raises:
            BadInput: there is no such tensor.
        """
        return self._find(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The dtype the tensor has on disk.

        Raises:
            BadInput: there is no such tensor.
        """
        return self._find(name).dtype

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
        columns: Ranges | None = None,
    ) -> Tensor:
        """A tensor, or the given rows (dimension 0) and columns (dimension 1) of it, joined in order.

        Only the bytes of the slice are read: rows as contiguous runs, columns as one run a row and span.
        Empty ranges give an empty tensor. ``dtype`` converts on the way, a few MiB at a time.

        Raises:
            BadInput: there is no such tensor, the ranges lie outside it, or the file ended early.
        """
        stored = self._find(name)
        row_spans = self._checked(name, stored.shape, 0, rows)
        column_spans = self._checked(name, stored.shape, 1, columns)
        shape = list(stored.shape)
        for dim, spans in enumerate((row_spans, column_spans)):
            if spans is not None:
                shape[dim] = sum(stop - start for start, stop in spans)
        target = torch.empty(shape, dtype=dtype or stored.dtype)
        if target.numel() == 0:
            return target
        runs: Iterable[tuple[int, int]] = _runs(stored, row_spans, column_spans)
        if self._need is not None:
            runs = list(runs)
            self._need(stored.path, runs)
        if target.dtype == stored.dtype:
            self._fill(name, stored, _bytes_of(target), runs)
        else:
            self._fill_converted(name, stored, target, runs)
        return target

    def rows(self, name: str, ids: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """Rows by id, in the order given, duplicates included: shape ``(len(ids), *shape(name)[1:])``.

        Each distinct row is read once.

        Raises:
            BadInput: there is no such tensor, or an id lies outside it.
        """
        wanted = torch.as_tensor(ids, dtype=torch.int64)
        distinct, inverse = torch.unique(wanted, return_inverse=True)
        if len(distinct) and int(distinct[0]) < 0:
            raise BadInput(f"{name} has no row {int(distinct[0])}.")
        return self.read(name, dtype=dtype, rows=Ranges.covering(distinct.tolist()))[inverse]

    def fetch(self, parts: Sequence[Part], progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Make parts present in few requests, so that later reads of them ask for nothing; nothing is read.

        Args:
            parts: tensors, with rows and columns as in :meth:`read`.
            progress: told bytes done and bytes in all, those that were here before included.

        Raises:
            BadInput: there is no such tensor, or the ranges lie outside it.
        """
        if self._need is None:
            return
        wanted: list[tuple[Path, list[tuple[int, int]]]] = []
        for name, rows, columns in parts:
            stored = self._find(name)
            spans = [self._checked(name, stored.shape, dim, ranges) for dim, ranges in enumerate((rows, columns))]
            wanted.append((stored.path, list(_runs(stored, *spans))))
        total = sum(length for _, runs in wanted for _, length in runs)
        done = 0
        at_once: list[tuple[int, int]] = []
        for i, (path, runs) in enumerate(wanted):
            at_once += runs
            last = i + 1 == len(wanted) or wanted[i + 1][0] != path
            size = sum(length for _, length in at_once)
            if last or size >= _FETCHED_AT_ONCE:
                self._need(path, at_once)
                done, at_once = done + size, []
                progress(done, total)

    def close(self) -> None:
        """Close the files; reading afterwards fails."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._stored = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, name: str) -> Stored:
        stored = self._stored.get(name)
        if stored is None:
            raise BadInput(f"The checkpoint in {self.directory} holds no tensor {name}.")
        return stored

    def _checked(
        self, name: str, shape: tuple[int, ...], dim: int, ranges: Ranges | None
    ) -> tuple[tuple[int, int], ...] | None:
        if ranges is None:
            return None
        spans = ranges.spans
        what = ("row", "column")[dim]
        if len(shape) <= dim:
            raise BadInput(f"{name} in {self.directory} has shape {shape}: there are no {what}s to slice.")
        if spans and spans[-1][1] > shape[dim]:
            raise BadInput(
                f"{name} in {self.directory} has shape {shape}: "
                f"{what} {spans[-1][1] - 1} lies outside its {shape[dim]} {what}s."
            )
        return spans

    def _fill(self, name: str, stored: Stored, target: memoryview, runs: Iterable[tuple[int, int]]) -> None:
        at = 0
        for offset, length in runs:
            self._pread(name, stored, target[at : at + length], offset)
            at += length
        with self._lock:
            self._bytes_read += at

    def _fill_converted(self, name: str, stored: Stored, target: Tensor, runs: Iterable[tuple[int, int]]) -> None:
        """Like ``_fill``, through a small buffer in the dtype on disk."""
        flat, at = target.view(-1), 0
        buffer = torch.empty(min(_CONVERT_BYTES // stored.dtype.itemsize, len(flat)), dtype=stored.dtype)
        for block in _blocks(runs, buffer.nbytes):
            part = buffer[: len(flat) - at]
            self._fill(name, stored, _bytes_of(part), block)
            flat[at : at + len(part)].copy_(part)
            at += len(part)

    def _pread(self, name: str, stored: Stored, target: memoryview, offset: int) -> None:
        while target:
            count = os.preadv(stored.descriptor, [target], offset)
            if count == 0:
                raise BadInput(f"{stored.path} ended while {name} was read: copy the file again.")
            target, offset = target[count:], offset + count


def _blocks(runs: Iterable[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    """The same runs, cut and grouped so that each group holds ``size`` bytes; the last may hold fewer."""
    block, room = [], size
    for offset, length in runs:
        while length:
            taken = min(length, room)
            block.append((offset, taken))
            offset, length, room = offset + taken, length - taken, room - taken
            if room == 0:
                yield block
                block, room = [], size
    if block:
        yield block


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _runs(
    stored: Stored, rows: tuple[tuple[int, int], ...] | None, columns: tuple[tuple[int, int], ...] | None
) -> Iterator[tuple[int, int]]:
    """Contiguous runs ``(offset in the file, length)`` of a slice, in bytes and in order."""
    size = stored.dtype.itemsize
    row_bytes = math.prod(stored.shape[1:]) * size
    row_spans = ((0, stored.shape[0] if stored.shape else 1),) if rows is None else rows
    if columns is None or columns == ((0, stored.shape[1]),):
        for start, stop in row_spans:
            yield stored.offset + start * row_bytes, (stop - start) * row_bytes
        return
    column_bytes = math.prod(stored.shape[2:]) * size
    for start, stop in row_spans:
        for row in range(start, stop):
            for first, last in columns:
                yield stored.offset + row * row_bytes + first * column_bytes, (last - first) * column_bytes
