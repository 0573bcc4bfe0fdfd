"""The examples of all contributions, found by number and read one at a time."""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from potluck.errors import BadInput
from potluck.split.agreement import Agreement, Manifest, Part, differences
from potluck.split.check import supervised_bits
from potluck.split.encoding import decode, decode_rows, int4_hidden_size
from potluck.split.shard_file import ShardFile
from potluck.split.store import Store

_MOST_OPEN = 64


@dataclass(frozen=True)
class StoredExample:
    """One example as the server has it."""

    x_TD: Tensor
    """float32 activations of its T positions."""
    positions_N: Tensor
    """int64, supervised positions, ascending."""
    targets_N: Tensor
    """int64: rows of the contribution's table, or token ids where targets are ids."""
    contribution: int
    """Its contribution's place in :attr:`Dataset.contributions`."""


class Tables(NamedTuple):
    """The rows a contribution brought, float32; both empty where targets are ids."""

    targets_UD: Tensor
    negatives_MD: Tensor


class _Place(NamedTuple):
    """A shard of examples, and where its first one stands."""

    sha256: str
    contribution: int
    hidden_size: int


class Dataset:
    """An index over the store's contributions at the time it is made: about 40 bytes an example, no activations.

    Threads may read at the same time; so may processes that were forked.
    """

    contributions: list[Manifest]
    lengths: NDArray[np.int64]
    """Positions of each example."""
    target_counts: NDArray[np.int64]
    """Supervised positions of each example."""
    clients: NDArray[np.int64]
    """Place in :attr:`client_names` of each example's client."""
    client_names: list[str]

    def __init__(
        self,
        store: Store,
        part: Part = "train",
        agreement: Agreement | None = None,
        contributions: Sequence[Manifest] | None = None,
    ) -> None:
        """Index the examples of ``part``: ``train`` or ``held-out``.

        Args:
            store: where they lie.
            part: which.
            agreement: what the contributions must agree with; with each other, if None.
            contributions: of which; all that are in the store by now, if None.

        Raises:
            BadInput: nothing was contributed yet, or contributions do not agree.
        """
        self.contributions = store.contributions() if contributions is None else [*contributions]
        if not self.contributions:
            raise BadInput(f"Nothing has been contributed to {store.directory} yet: let clients contribute first.")
        for manifest in self.contributions:
            if told := differences(agreement or self.contributions[0].agreement, manifest.agreement):
                raise BadInput(f"The contribution of {manifest.client} is for something else. {told}")
        self.client_names = sorted({manifest.client for manifest in self.contributions})
        self._store = store
        self._open: OrderedDict[str, ShardFile] = OrderedDict()
        self._lock = threading.Lock()
        self._places: list[_Place] = []

        columns: list[list[NDArray[np.int64]]] = [[] for _ in range(6)]
        for i, manifest in enumerate(self.contributions):
            client = self.client_names.index(manifest.client)
            for listed in manifest.shards:
                if listed.part == part:
                    with store.shard(listed.sha256) as shard:
                        lengths_B = shard.read("lengths_B").numpy().astype(np.int64)
                        first_B = np.cumsum(lengths_B) - lengths_B
                        counts_B = np.add.reduceat(supervised_bits(shard, listed.tokens), first_B, dtype=np.int64)
                        place = np.full_like(lengths_B, len(self._places))
                        self._places.append(_Place(listed.sha256, i, _hidden_size(shard)))
                    target_B = np.cumsum(counts_B) - counts_B
                    found = (lengths_B, counts_B, first_B, target_B, place, np.full_like(place, client))
                    for column, values in zip(columns, found, strict=True):
                        column.append(values)
        whole = [np.concatenate([np.empty(0, np.int64), *column]) for column in columns]
        self.lengths, self.target_counts, self._first, self._first_target, self._place, self.clients = whole

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, indices: Sequence[int]) -> list[StoredExample]:
        """Examples by number, in the order given; only their bytes are read.

        Raises:
            BadInput: a shard was withdrawn meanwhile.
        """
        with self._lock:
            return [self._read(int(i)) for i in indices]

    def tables(self) -> Iterator[Tables]:
        """What each contribution brought beside its examples, in their order, one in memory at a time.

        Raises:
            BadInput: as :meth:`read`.
        """
        for manifest in self.contributions:
            yield Tables(self._rows(manifest, "table"), self._rows(manifest, "negatives"))

    def close(self) -> None:
        """Close the shards that are open."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, i: int) -> StoredExample:
        place = self._places[self._place[i]]
        shard = self._shard(place.sha256)
        first, length = int(self._first[i]), int(self.lengths[i])
        start, count = int(self._first_target[i]), int(self.target_counts[i])
        bits = np.unpackbits(shard.read("supervised", first // 8, (first + length + 7) // 8).numpy())
        supervised_T = bits[first % 8 : first % 8 + length]
        return StoredExample(
            x_TD=decode(_slice(shard, _runs(shard, first, length)), place.hidden_size),
            positions_N=torch.from_numpy(np.flatnonzero(supervised_T)),
            targets_N=shard.read("targets_N", start, start + count).long(),
            contribution=place.contribution,
        )

    def _shard(self, sha256: str) -> ShardFile:
        shard = self._open.pop(sha256, None) or self._store.shard(sha256)
        self._open[sha256] = shard
        if len(self._open) > _MOST_OPEN:
            self._open.popitem(last=False)[1].close()
        return shard

    def _rows(self, manifest: Manifest, part: Part) -> Tensor:
        found = []
        for listed in manifest.shards:
            if listed.part == part:
                with self._store.shard(listed.sha256) as shard:
                    found.append(decode_rows({name: shard.read(name) for name in shard.tensors}))
        return torch.cat(found) if found else torch.empty(0, 0)


def _hidden_size(shard: ShardFile) -> int:
    if "q_RH" in shard.tensors:
        return int4_hidden_size(shard.read("q_RH", 0, 1))
    stored = shard.tensors.get("x_RD") or shard.tensors["q_RD"]
    return stored.shape[1]


def _runs(shard: ShardFile, first: int, length: int) -> list[tuple[int, int]]:
    """Runs ``[start, stop)`` of the activations of positions ``first``, ``first + 1``, ... in order."""
    if "rows_T" not in shard.tensors:
        return [(first, first + length)]
    rows_T = shard.read("rows_T", first, first + length).numpy()
    begins = np.flatnonzero(np.diff(rows_T, prepend=rows_T[0] - 2) != 1)
    ends = np.append(begins[1:], length) - 1
    return [(int(rows_T[a]), int(rows_T[b]) + 1) for a, b in zip(begins, ends, strict=True)]


def _slice(shard: ShardFile, runs: Sequence[tuple[int, int]]) -> dict[str, Tensor]:
    names = shard.tensors.keys() & {"x_RD", "q_RD", "q_RH", "scale_RG", "outlier_RC"}
    tensors = {name: shard.gather(name, runs) for name in names}
    if "outliers_C" in shard.tensors:
        tensors["outliers_C"] = shard.read("outliers_C")
    return tensors
