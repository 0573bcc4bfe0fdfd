import os
import tempfile
from pathlib import Path

import pytest
import torch
from contributed import KEY, OTHER_KEY, VOCAB, agreement, contribute, limits, record, some_records, spool, table_of
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import BadInput
from potluck.split.agreement import Targets
from potluck.split.dataset import Dataset
from potluck.split.encoding import Encoding
from potluck.split.records import Record, TargetTable, draw_negatives
from potluck.split.store import Store

ENCODINGS: list[Encoding] = ["fp32", "bf16", "int8", "int4"]
RELATIVE: dict[Encoding, float] = {"fp32": 0.0, "bf16": 2**-8, "int8": 0.501 / 126, "int4": 0.501 / 6.9}
"""Largest error, in parts of the row's largest value."""


@st.composite
def _examples(draw: st.DrawFn) -> tuple[int, list[Record]]:
    D = draw(st.sampled_from([3, 8, 33, 45]))
    records = []
    for _ in range(draw(st.integers(1, 12))):
        prefix = draw(st.lists(st.integers(0, 2), min_size=1, max_size=11))
        positions = draw(st.sets(st.integers(0, len(prefix) - 1), min_size=1))
        records.append(record(prefix, sorted(positions), [draw(st.integers(0, VOCAB - 1)) for _ in positions], D))
    return D, records


@settings(max_examples=40, deadline=None)
@given(
    _examples(), st.sampled_from(ENCODINGS), st.sampled_from(["embeddings", "ids"]), st.sampled_from([4096, 1 << 20])
)
def test_records_come_back_from_the_store(
    examples: tuple[int, list[Record]], encoding: Encoding, targets: Targets, shard_bytes: int
) -> None:
    D, records = examples
    with tempfile.TemporaryDirectory() as root:
        store = Store(Path(root) / "store")
        manifest = spool(Path(root) / "spool", records, encoding=encoding, targets=targets, shard_bytes=shard_bytes)
        contribute(store, Path(root) / "spool", manifest, limits(encoding, targets, D))
        with Dataset(store) as dataset:
            assert dataset.lengths.tolist() == [len(one.prefix) for one in records]
            assert dataset.target_counts.tolist() == [len(one.targets) for one in records]
            table = TargetTable()
            for one, stored in zip(records, dataset.read(range(len(records))), strict=True):
                assert stored.x_TD.dtype == torch.float32
                error = (stored.x_TD - one.x_TD).abs()
                assert bool((error <= one.x_TD.abs().amax(1, keepdim=True) * RELATIVE[encoding]).all())
                assert stored.positions_N.tolist() == list(one.positions)
                wanted = list(one.targets) if targets == "ids" else table.indices(one.targets)
                assert stored.targets_N.tolist() == wanted
            [tables] = dataset.tables()
            assert tables.targets_UD.shape[0] == len(table)


def test_examples_of_several_clients_are_read_in_any_order(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    sent = {"ann": some_records(70, seed=1), "bob": some_records(30, seed=2)}
    held_out = some_records(7, seed=3)
    for client, key in (("bob", OTHER_KEY), ("ann", KEY)):
        manifest = spool(tmp_path, sent[client], encoding="fp32", client=client, held_out=held_out, shard_bytes=32_768)
        contribute(store, tmp_path, manifest, limits("fp32"), key)
    records = [*sent["ann"], *sent["bob"]]
    with Dataset(store) as dataset:
        assert dataset.client_names == ["ann", "bob"]
        assert dataset.clients.tolist() == [0] * 70 + [1] * 30
        assert [manifest.client for manifest in dataset.contributions] == ["ann", "bob"]
        order = torch.randperm(100, generator=torch.Generator().manual_seed(0)).tolist()
        for i, stored in zip(order, dataset.read(order), strict=True):
            assert torch.equal(stored.x_TD, records[i].x_TD)
            assert stored.contribution == int(i >= 70)
        rows = table_of(45)
        for stored, one in zip(dataset.read([3, 99]), (records[3], records[99]), strict=True):
            tables = [*dataset.tables()][stored.contribution]
            assert torch.equal(tables.targets_UD[stored.targets_N], rows[list(one.targets)])
            assert torch.equal(tables.negatives_MD, rows[draw_negatives(VOCAB, 10, 1)])
    with Dataset(store, "held-out") as dataset:
        assert dataset.clients.tolist() == [0] * 7 + [1] * 7
        assert torch.equal(dataset.read([8])[0].x_TD, held_out[1].x_TD)


def test_reading_is_the_same_alone_and_together_bit_for_bit(tmp_path: Path) -> None:
    for encoding in ENCODINGS:
        store = Store(tmp_path / encoding)
        manifest = spool(tmp_path, some_records(40), encoding=encoding, shard_bytes=16_384)
        contribute(store, tmp_path, manifest, limits(encoding))
        with Dataset(store) as first, Dataset(Store(tmp_path / encoding)) as second:
            together = first.read(range(40))
            for i in reversed(range(40)):
                assert torch.equal(second.read([i])[0].x_TD, together[i].x_TD)


def test_only_the_bytes_of_an_example_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    manifest = spool(tmp_path, some_records(300, D=64), encoding="fp32", targets="ids")
    contribute(store, tmp_path, manifest, limits("fp32", "ids", D=64))
    with Dataset(store) as dataset:
        dataset.read([0])
        read = []
        real = os.preadv

        def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            count = real(descriptor, buffers, offset)
            read.append(count)
            return count

        monkeypatch.setattr(os, "preadv", counted)
        [stored] = dataset.read([150])
    T, N = len(stored.x_TD), len(stored.targets_N)
    assert sum(read) <= T * 64 * 4 + T * 4 + N * 4 + T // 8 + 2
    assert sum(read) >= T * 64 * 4


def test_more_shards_than_files_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.split.dataset._MOST_OPEN", 2)
    store = Store(tmp_path / "store")
    records = some_records(60)
    manifest = spool(tmp_path, records, encoding="fp32", shard_bytes=8192)
    contribute(store, tmp_path, manifest, limits("fp32"))
    with Dataset(store) as dataset:
        for _ in range(2):
            for one, stored in zip(records, dataset.read(range(60)), strict=True):
                assert torch.equal(stored.x_TD, one.x_TD)


def test_nothing_contributed_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="Nothing has been contributed"):
        Dataset(Store(tmp_path))


def test_no_held_out_examples_are_none(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    contribute(store, tmp_path, spool(tmp_path, some_records(3)), limits())
    with Dataset(store, "held-out") as dataset:
        assert len(dataset) == 0
        assert dataset.read([]) == []
        assert dataset.lengths.dtype == dataset.clients.dtype


def test_contributions_that_do_not_agree_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    contribute(store, tmp_path, spool(tmp_path, some_records(3)), limits())
    with pytest.raises(BadInput, match=r"contribution of ann is for something else.*cut 5 here, 2 there"):
        Dataset(store, agreement=agreement(cut=5))
    other = spool(tmp_path, some_records(3), client="bob", encoding="bf16")
    contribute(store, tmp_path, other, limits("bf16"), OTHER_KEY)
    with pytest.raises(BadInput, match=r"contribution of bob .* encoding int8 here, bf16 there"):
        Dataset(store)


def test_a_withdrawn_shard_is_told(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    contribute(store, tmp_path, spool(tmp_path, some_records(3)), limits())
    with Dataset(store) as dataset:
        store.withdraw("ann")
        with pytest.raises(BadInput, match="is gone: its contribution was withdrawn"):
            dataset.read([0])
