"""From the client part's activations to shards in a spool directory, one shard in memory at a time."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from potluck.errors import BadInput
from potluck.models.durable import write_durably
from potluck.split.agreement import Part, Shard
from potluck.split.encoding import Encoding, bytes_per_table_row, encode, encode_rows, outlier_channels, record_bytes
from potluck.split.shard_file import SHARD_BYTES, shard_path

_HELD_BYTES = 64 << 20  # of float32 activations: a shard in few bits is closed before it would have filled its file
_HEADER_ROOM = 2048
_ENCODED_AT_ONCE = 4 << 20
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Record:
    """One example on its way, as the client part gave it."""

    x_TD: Tensor
    """float32 activations of the positions 0..T-1 after the client's blocks; T is the example's tokens less one."""
    prefix: tuple[int, ...]
    """The ids of these T positions, by which equal prefixes are found; never leaves the client."""
    positions: tuple[int, ...]
    """Supervised positions, ascending; at least one."""
    targets: tuple[int, ...]
    """The token ids to be said there."""


class TargetTable:
    """Distinct target ids in the order they were first seen: what a token's index means, known to the client alone."""

    def __init__(self) -> None:
        self._index: dict[int, int] = {}

    def indices(self, ids: Sequence[int]) -> list[int]:
        """Each id's row in the table; new ids get the next rows."""
        return [self._index.setdefault(token, len(self._index)) for token in ids]

    @property
    def ids(self) -> list[int]:
        """The table's rows as token ids."""
        return [*self._index]

    def __len__(self) -> int:
        return len(self._index)


def draw_negatives(vocab_size: int, count: int, seed: int) -> list[int]:
    """``count`` distinct token ids (all, if there are fewer), drawn uniformly."""
    drawn = np.random.default_rng(seed).choice(vocab_size, size=min(count, vocab_size), replace=False)
    return [int(token) for token in drawn]


def write_records(
    records: Iterable[Record],
    directory: Path,
    *,
    part: Part,
    encoding: Encoding,
    table: TargetTable | None,
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[Shard]:
    """Write records into shards, giving each as soon as it lies in ``directory`` under :func:`shard_path`.

    Equal records, in the same order, give the same files, so that an upload goes on where it stopped. An example's
    prefix that another example of the same shard has too is stored once: the client part is causal, so that its
    activations are the same.

    Args:
        records: streamed; at most one shard of them is held, 64 MiB of activations.
        directory: the spool.
        part: ``train`` or ``held-out``.
        encoding: of the activations.
        table: gives targets their indices; None sends token ids.
        shard_bytes: no file is larger.

    Raises:
        BadInput: one example is larger than a shard, or an activation is NaN or infinite.
        SaveFailed: the disk is full.
    """
    pending = None
    for number, record in enumerate(records, 1):
        _check(record)
        if pending is not None and not pending.fits(record, shard_bytes):
            yield _write(directory, part, pending)
            pending = None
        if pending is None:
            pending = _Pending(encoding, table, record.x_TD.shape[1])
            if pending.bytes_with(record) > shard_bytes - _HEADER_ROOM:
                raise BadInput(
                    f"Example {number} of {part} has {len(record.prefix) + 1} tokens, which is more than a shard of "
                    f"{shard_bytes >> 10} KiB holds in {encoding}: lower data.max_length."
                )
        pending.add(record)
    if pending is not None:
        yield _write(directory, part, pending)


def write_rows(
    ids: Sequence[int],
    rows: Callable[[list[int]], Tensor],
    directory: Path,
    *,
    part: Part,
    encoding: Encoding,
    shard_bytes: int = SHARD_BYTES,
) -> Iterator[Shard]:
    """Write rows of the embedding or head table into shards, as :func:`write_records` does.

    Args:
        ids: which rows, in order.
        rows: reads rows by id, ``(len(ids), D)``; asked for one shard at a time.
        directory: the spool.
        part: ``table`` or ``negatives``.
        encoding: of the contribution.
        shard_bytes: no file is larger.

    Raises:
        BadInput: a row holds NaN or infinity.
        SaveFailed: the disk is full.
    """
    if not ids:
        return
    hidden_size = rows(list(ids[:1])).shape[1]
    room = shard_bytes - _HEADER_ROOM
    at_once = max(1, min(room // bytes_per_table_row(encoding, hidden_size), _HELD_BYTES // (hidden_size * 4)))
    for start in range(0, len(ids), at_once):
        some = list(ids[start : start + at_once])
        sha256, size = _store(directory, part, encode_rows(rows(some).float(), encoding))
        yield Shard(sha256=sha256, bytes=size, part=part, rows=len(some))


class _Pending:
    """The examples of one shard before it is written."""

    def __init__(self, encoding: Encoding, table: TargetTable | None, hidden_size: int) -> None:
        self._encoding = encoding
        self._table = table
        self._hidden_size = hidden_size
        self._x: list[Tensor] = []
        self._largest_D = torch.zeros(hidden_size)
        self._row_after: dict[tuple[int, int], int] = {}
        """The row of a prefix, by the row of the prefix one token shorter (-1 for none) and its last token."""
        self._rows_T: list[int] = []
        self._supervised: list[bool] = []
        self.lengths: list[int] = []
        self.targets: list[int] = []

    @property
    def rows(self) -> int:
        return len(self._row_after)

    @property
    def tokens(self) -> int:
        return len(self._rows_T)

    def fits(self, record: Record, shard_bytes: int) -> bool:
        """Whether the shard stays within its bounds with one more example."""
        rows = self.rows + len(record.prefix) - len(self._known(record.prefix))
        held = rows * self._hidden_size * _FLOAT_BYTES
        return held <= _HELD_BYTES and self.bytes_with(record) <= shard_bytes - _HEADER_ROOM

    def bytes_with(self, record: Record) -> int:
        known = len(self._known(record.prefix))
        tokens = self.tokens + len(record.prefix)
        rows = self.rows + len(record.prefix) - known
        return record_bytes(
            self._encoding,
            self._hidden_size,
            rows=rows,
            tokens=tokens,
            examples=len(self.lengths) + 1,
            targets=len(self.targets) + len(record.targets),
            shared=rows < tokens,
        )

    def add(self, record: Record) -> None:
        rows = self._known(record.prefix)
        if len(rows) < len(record.prefix):
            new_KD = record.x_TD[len(rows) :].detach().to("cpu", torch.float32, copy=True)
            self._x.append(new_KD)
            self._largest_D = torch.maximum(self._largest_D, new_KD.abs().amax(0))
        for token in record.prefix[len(rows) :]:
            key = (rows[-1] if rows else -1, token)
            self._row_after[key] = row = len(self._row_after)
            rows.append(row)
        self._rows_T += rows
        self.lengths.append(len(record.prefix))
        supervised = set(record.positions)
        self._supervised += [position in supervised for position in range(len(record.prefix))]
        self.targets += record.targets if self._table is None else self._table.indices(record.targets)

    def _known(self, prefix: tuple[int, ...]) -> list[int]:
        """The rows of the beginning that an example before had too."""
        rows: list[int] = []
        for token in prefix:
            row = self._row_after.get((rows[-1] if rows else -1, token))
            if row is None:
                break
            rows.append(row)
        return rows

    def tensors(self) -> dict[str, Tensor]:
        """What the shard's file holds; the activations are gone afterwards."""
        rows, tokens = self.rows, self.tokens
        tensors = {
            "lengths_B": torch.tensor(self.lengths, dtype=torch.int32),
            "supervised": torch.from_numpy(np.packbits(np.array(self._supervised, dtype=np.bool_))),
            "targets_N": torch.tensor(self.targets, dtype=torch.int32),
            **self._encoded(rows),
        }
        if rows < tokens:
            tensors["rows_T"] = torch.tensor(self._rows_T, dtype=torch.int32)
        return tensors

    def _encoded(self, rows: int) -> dict[str, Tensor]:
        """The activations, a few MiB at a time, so that little is held beside them and what they become."""
        outliers_C = outlier_channels(self._largest_D, self._encoding)
        encoded: dict[str, Tensor] = {}
        at = 0
        self._x.reverse()
        while self._x:
            some, size = [self._x.pop()], 0
            while self._x and (size := size + some[-1].nbytes) < _ENCODED_AT_ONCE:
                some.append(self._x.pop())
            x_KD = torch.cat(some)
            for name, tensor in encode(x_KD, self._encoding, outliers_C).items():
                if name == "outliers_C":
                    encoded[name] = tensor
                    continue
                whole = encoded.setdefault(name, tensor.new_empty((rows, *tensor.shape[1:])))
                whole[at : at + len(tensor)] = tensor
            at += len(x_KD)
        return encoded


def _check(record: Record) -> None:
    length = len(record.prefix)
    inside = all(0 <= position < length for position in record.positions)
    ascending = all(a < b for a, b in zip(record.positions, record.positions[1:], strict=False))
    if record.x_TD.shape[0] != length or len(record.positions) != len(record.targets) or not record.positions:
        raise ValueError(f"{tuple(record.x_TD.shape)} activations, {length} ids, {len(record.targets)} targets")
    if not (inside and ascending):
        raise ValueError(f"positions {record.positions} of {length}")


def _write(directory: Path, part: Part, pending: _Pending) -> Shard:
    rows = pending.rows
    sha256, size = _store(directory, part, pending.tensors())
    return Shard(
        sha256=sha256,
        bytes=size,
        part=part,
        examples=len(pending.lengths),
        tokens=pending.tokens,
        targets=len(pending.targets),
        rows=rows,
    )


def _store(directory: Path, part: Part, tensors: dict[str, Tensor]) -> tuple[str, int]:
    content = save(tensors, metadata={"part": part})  # one key: the library writes several in no fixed order
    sha256 = hashlib.sha256(content).hexdigest()
    write_durably(shard_path(directory, sha256), content, directory)
    return sha256, len(content)
