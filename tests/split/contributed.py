"""Records, shards and contributions for tests: activations are a function of the prefix, as a causal model's are."""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from potluck.split.agreement import Agreement, Manifest, Shard, Targets
from potluck.split.check import Limits, ShardInfo
from potluck.split.encoding import Encoding
from potluck.split.records import Record, TargetTable, draw_negatives, write_records, write_rows
from potluck.split.shard_file import SHARD_BYTES, shard_path
from potluck.split.store import Store

VOCAB = 97
KEY = "a" * 64
OTHER_KEY = "b" * 64


def table_of(D: int) -> Tensor:
    return torch.randn(VOCAB, D, generator=torch.Generator().manual_seed(7))


def activations(prefix: Sequence[int], D: int) -> Tensor:
    """Row t depends on ``prefix[: t + 1]`` alone; channel 0 is an outlier."""
    rows = [torch.zeros(D)]
    for token in prefix:
        rows.append(torch.roll(rows[-1], 1) * 0.5 + torch.cos(torch.arange(D) * (token + 1.0) * 0.37))
    x_TD = torch.stack(rows[1:])
    x_TD[:, 0] *= 100
    return x_TD


def record(prefix: Sequence[int], positions: Sequence[int], targets: Sequence[int], D: int = 45) -> Record:
    return Record(activations(prefix, D), tuple(prefix), tuple(positions), tuple(targets))


def some_records(count: int, D: int = 45, seed: int = 0, length: int = 12) -> list[Record]:
    """Half of them begin alike."""
    draw = random.Random(seed)
    records = []
    for i in range(count):
        prefix = [draw.randrange(VOCAB) for _ in range(draw.randint(1, length))]
        if i % 2:
            prefix = [3, 1, 4, *prefix]
        positions = sorted(draw.sample(range(len(prefix)), draw.randint(1, len(prefix))))
        records.append(record(prefix, positions, [draw.randrange(VOCAB) for _ in positions], D))
    return records


def agreement(encoding: Encoding = "int8", targets: Targets = "embeddings", cut: int = 2) -> Agreement:
    return Agreement(model="1" * 64, tokenizer="2" * 64, cut=cut, encoding=encoding, targets=targets)


def limits(encoding: Encoding = "int8", targets: Targets = "embeddings", D: int = 45) -> Limits:
    return Limits(agreement(encoding, targets), hidden_size=D, vocab_size=VOCAB, max_positions=64)


def spool(
    directory: Path,
    records: Sequence[Record],
    *,
    encoding: Encoding = "int8",
    targets: Targets = "embeddings",
    held_out: Sequence[Record] = (),
    client: str = "ann",
    negatives: int = 10,
    shard_bytes: int = SHARD_BYTES,
    data: str = "3" * 64,
) -> Manifest:
    """All shards of a contribution, written into ``directory``."""
    directory.mkdir(parents=True, exist_ok=True)
    D = records[0].x_TD.shape[1]
    table = TargetTable() if targets == "embeddings" else None
    shards: list[Shard] = []
    for part, some in (("train", records), ("held-out", held_out)):
        shards += write_records(some, directory, part=part, encoding=encoding, table=table, shard_bytes=shard_bytes)
    if table is not None:
        drawn = draw_negatives(VOCAB, negatives, seed=1)
        rows = table_of(D)
        for part, ids in (("table", table.ids), ("negatives", drawn)):
            shards += write_rows(
                ids, lambda ids: rows[list(ids)], directory, part=part, encoding=encoding, shard_bytes=shard_bytes
            )
    return Manifest(client=client, agreement=agreement(encoding, targets), data=data, shards=tuple(shards))


def send(store: Store, directory: Path, sha256: str, limits: Limits, client: str = "ann") -> ShardInfo:
    with store.incoming() as path:
        path.write_bytes(shard_path(directory, sha256).read_bytes())
        return store.accept(path, sha256, limits, client)


def contribute(store: Store, directory: Path, manifest: Manifest, limits: Limits, key: str = KEY) -> str:
    """Everything a client does: be registered, send what is missing, commit."""
    store.register(manifest.client, key)
    for sha256 in store.missing([shard.sha256 for shard in manifest.shards]):
        send(store, directory, sha256, limits, manifest.client)
    return store.commit(manifest, manifest.client, limits)
