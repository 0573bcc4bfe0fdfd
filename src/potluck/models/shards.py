"""Where the tensors of a safetensors checkpoint lie: its files, their headers, and what can be wrong with them."""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from potluck.errors import BadInput

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
BESIDE_WEIGHTS = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.jinja",
]
"""Patterns of the files that a model needs beside its weights."""
LFS_START = b"version https://git-lfs"

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
Need = Callable[[Path, list[tuple[int, int]]], None]
"""Makes runs ``(offset, length)`` of a file present before they are read."""

_LARGEST_HEADER = 100_000_000  # the bound of the safetensors library itself


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies."""

    path: Path
    descriptor: int
    """The open file."""
    offset: int
    """Its first byte in the file."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def shard_files(directory: Path, need: Need | None = None) -> dict[str, list[str] | None]:
    """The files of a checkpoint, each with the tensors that its index promises; None where there is no index.

    Raises:
        BadInput: there is no checkpoint, or its index is damaged or points outside the directory.
    """
    index = directory / INDEX_FILE
    if (directory / SINGLE_FILE).is_file():
        return {SINGLE_FILE: None}
    if not index.is_file():
        raise BadInput(f"{directory} holds no {SINGLE_FILE} and no {INDEX_FILE}: it is not a safetensors checkpoint.")
    if need is not None:
        need(index, [(0, index.stat().st_size)])
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards: dict[str, list[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise BadInput(f"{index} names {file!r}, which is no file of that directory.")
            shards.setdefault(file, []).append(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{index} is not an index of safetensors shards: copy it again.") from None
    if not shards:
        raise BadInput(f"{index} names no tensor: copy it again.")
    return dict(shards)


def read_header(path: Path, descriptor: int, need: Need | None = None) -> dict[str, Stored]:
    """Layout of one safetensors file: 8 bytes little-endian header length, the header as JSON, the tensors' bytes.

    Raises:
        BadInput: the file is a Git LFS pointer, cut short, damaged, or holds a dtype torch has no plain tensor for.
    """
    file_size = os.fstat(descriptor).st_size
    if need is not None:
        need(path, [(0, min(64, file_size))])
    prefix = os.pread(descriptor, 64, 0)
    if prefix.startswith(LFS_START):
        raise BadInput(f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull' in its directory.")
    header_size = int.from_bytes(prefix[:8], "little")
    if len(prefix) < 8 or header_size > min(_LARGEST_HEADER, file_size - 8):
        raise BadInput(f"{path} is not a safetensors file or was cut short ({file_size} bytes): copy it again.")
    if need is not None:
        need(path, [(8, header_size)])
    try:
        header: dict[str, dict[str, Any]] = json.loads(os.pread(descriptor, header_size, 8))
        header.pop("__metadata__", None)
        return {name: _located(path, descriptor, 8 + header_size, name, entry) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{path} has a damaged safetensors header: copy it again.") from None


def _located(path: Path, descriptor: int, data_start: int, name: str, entry: dict[str, Any]) -> Stored:
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise BadInput(
            f"{path}: {name} has dtype {entry['dtype']}, which cannot be read. If these are quantised weights, use the"
            " same model with weights in float32, float16 or bfloat16."
        )
    shape = tuple(int(size) for size in entry["shape"])
    start, stop = (int(at) for at in entry["data_offsets"])
    if min(shape, default=0) < 0 or start < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise BadInput(f"{path}: {name} has shape {shape}, which is not {stop - start} bytes of {entry['dtype']}.")
    file_size = os.fstat(descriptor).st_size
    if data_start + stop > file_size:
        raise BadInput(
            f"{path} was cut short: {name} ends at byte {data_start + stop}, the file has {file_size}. Copy it again."
        )
    return Stored(path, descriptor, data_start + start, dtype, shape)
