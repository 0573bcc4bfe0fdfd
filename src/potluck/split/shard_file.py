"""Reading a shard: its part, its tensors, and single rows of them."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from potluck.errors import BadInput, from_outside
from potluck.models.shards import Stored, read_header
from potluck.split.agreement import Part

SHARD_BYTES = 32 << 20
"""No shard's file is larger."""

_LARGEST_HEADER = 1 << 16
_PARTS: dict[str, Part] = {"train": "train", "held-out": "held-out", "table": "table", "negatives": "negatives"}


def shard_path(directory: Path, sha256: str) -> Path:
    """Where a shard lies in a directory of shards."""
    return directory / f"{sha256}.safetensors"


class ShardFile:
    """An open shard. Only the bytes asked for are read; reads of several threads do not disturb each other."""

    def __init__(self, path: Path) -> None:
        """Open a shard and read its header.

        Raises:
            BadInput: it is gone, no safetensors file, cut short or damaged, or has no known part.
        """
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise BadInput(f"Shard {path.stem[:12]} is gone: its contribution was withdrawn.") from None
        try:
            self.size = os.fstat(self._descriptor).st_size
            self.part = self._part()
            self.tensors: dict[str, Stored] = self._header()
        except BaseException:
            self.close()
            raise

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows ``[start, stop)`` of a tensor along dimension 0, or all of it."""
        stored = self.tensors[name]
        return self.gather(name, [(start, stored.shape[0] if stop is None else stop)])

    def gather(self, name: str, runs: Sequence[tuple[int, int]]) -> Tensor:
        """Runs ``[start, stop)`` of rows of a tensor, joined in the order given; they must lie inside it.

        Raises:
            BadInput: the file ended early.
        """
        stored = self.tensors[name]
        row_bytes = torch.Size(stored.shape[1:]).numel() * stored.dtype.itemsize
        rows = sum(stop - start for start, stop in runs)
        target = torch.empty((rows, *stored.shape[1:]), dtype=stored.dtype)
        buffer = target.view(-1).view(torch.uint8).numpy().data if target.numel() else memoryview(b"")
        at = 0
        for start, stop in runs:
            length = (stop - start) * row_bytes
            self._pread(buffer[at : at + length], stored.offset + start * row_bytes)
            at += length
        return target

    def close(self) -> None:
        """Close the file; reading afterwards fails."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _part(self) -> Part:
        size = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if self.size < 8 or size > min(_LARGEST_HEADER, self.size - 8):
            raise BadInput(f"The shard is not a safetensors file or was cut short ({self.size} bytes).")
        try:
            part = _PARTS.get(json.loads(os.pread(self._descriptor, size, 8))["__metadata__"]["part"])
        except (ValueError, KeyError, TypeError, RecursionError):
            part = None
        if part is None:
            raise BadInput("The shard does not say which part of a contribution it is, or its header is damaged.")
        return part

    def _header(self) -> dict[str, Stored]:
        try:
            return read_header(self.path, self._descriptor)
        except BadInput as error:
            # who sent it knows the shard by its name, and the server's directories are none of their business;
            # the sentence quotes the header, and the server's terminal must not obey it
            raise BadInput(from_outside(str(error).replace(str(self.path), "The shard"))) from None
        except (OverflowError, RecursionError):
            raise BadInput("The shard has a damaged safetensors header.") from None

    def _pread(self, target: memoryview, offset: int) -> None:
        while target:
            count = os.preadv(self._descriptor, [target], offset)
            if count == 0:
                raise BadInput(f"{self.path} ended while it was read: copy the store again.")
            target, offset = target[count:], offset + count
