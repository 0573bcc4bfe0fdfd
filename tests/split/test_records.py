import hashlib
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from contributed import VOCAB, limits, record, some_records, spool, table_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from potluck.errors import BadInput, SaveFailed
from potluck.split.agreement import Shard
from potluck.split.check import check_shard
from potluck.split.encoding import Encoding, record_bytes
from potluck.split.records import Record, TargetTable, draw_negatives, write_records, write_rows
from potluck.split.shard_file import ShardFile, shard_path

ENCODINGS: list[Encoding] = ["fp32", "bf16", "int8", "int4"]


def _tensors(directory: Path, shard: Shard) -> dict[str, Tensor]:
    with ShardFile(shard_path(directory, shard.sha256)) as file:
        return {name: file.read(name) for name in file.tensors}


def _written(
    directory: Path, records: list[Record], encoding: Encoding = "int8", shard_bytes: int = 1 << 20, ids: bool = False
) -> list[Shard]:
    table = None if ids else TargetTable()
    return [*write_records(records, directory, part="train", encoding=encoding, table=table, shard_bytes=shard_bytes)]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_shards_are_named_by_their_content_and_stay_within_their_size(tmp_path: Path, encoding: Encoding) -> None:
    records = some_records(200)
    shards = _written(tmp_path, records, encoding, shard_bytes=16_384)
    assert len(shards) > 2
    for shard in shards:
        content = shard_path(tmp_path, shard.sha256).read_bytes()
        assert hashlib.sha256(content).hexdigest() == shard.sha256
        assert len(content) == shard.bytes <= 16_384
        info = check_shard(shard_path(tmp_path, shard.sha256), limits(encoding))
        listed = (shard.bytes, shard.part, shard.examples, shard.tokens, shard.targets, shard.rows)
        assert listed == (info.bytes, info.part, info.examples, info.tokens, info.targets, info.rows)
    assert sum(shard.examples for shard in shards) == 200
    assert sum(shard.tokens for shard in shards) == sum(len(record.prefix) for record in records)
    assert sum(shard.targets for shard in shards) == sum(len(record.targets) for record in records)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}


def test_the_same_records_give_the_same_files_again(tmp_path: Path) -> None:
    records = some_records(60)
    first = spool(tmp_path / "a", records, shard_bytes=16_384)
    assert spool(tmp_path / "b", records, shard_bytes=16_384) == first
    assert spool(tmp_path / "c", [*records[1:], records[0]], shard_bytes=16_384) != first


def test_a_prefix_is_stored_once_a_shard(tmp_path: Path) -> None:
    records = [record([5, 6, 7], [2], [1]), record([5, 6, 9, 9], [3], [2]), record([6, 6], [0], [3])]
    [shard] = _written(tmp_path, [*records, records[0]], "fp32")
    tensors = _tensors(tmp_path, shard)
    assert (shard.tokens, shard.rows) == (12, 7)
    assert tensors["rows_T"].tolist() == [0, 1, 2, 0, 1, 3, 4, 5, 6, 0, 1, 2]
    for i, start in ((0, 0), (1, 3), (2, 7)):
        rows = tensors["rows_T"][start : start + len(records[i].prefix)].long()
        assert torch.equal(tensors["x_RD"][rows], records[i].x_TD)


def test_nothing_shared_needs_no_rows(tmp_path: Path) -> None:
    [shard] = _written(tmp_path, [record([1, 2], [0], [4]), record([2, 1], [1], [4])])
    assert "rows_T" not in _tensors(tmp_path, shard)
    assert shard.rows == shard.tokens == 4


def test_targets_are_rows_of_the_table_in_the_order_first_seen(tmp_path: Path) -> None:
    table = TargetTable()
    records = [record([1, 2, 3], [0, 2], [90, 12]), record([9, 2], [0, 1], [12, 55])]
    shards = [*write_records(records, tmp_path, part="train", encoding="int8", table=table)]
    later = [record([4], [0], [55])]
    shards += write_records(later, tmp_path, part="held-out", encoding="int8", table=table)
    assert table.ids == [90, 12, 55]
    assert _tensors(tmp_path, shards[0])["targets_N"].tolist() == [0, 1, 1, 2]
    assert _tensors(tmp_path, shards[1])["targets_N"].tolist() == [2]
    assert [shard.part for shard in shards] == ["train", "held-out"]


def _appears(wanted: list[int], values: list[int]) -> bool:
    return any(values[i : i + len(wanted)] == wanted for i in range(len(values) - len(wanted) + 1))


def test_no_shard_holds_ids_where_targets_are_embeddings(tmp_path: Path) -> None:
    records = [
        record([50 + i, 60 + i, 70 + i, 80 + i], [0, 1, 2, 3], [60 + i, 70 + i, 80 + i, 90 + i % 6]) for i in range(9)
    ]
    for targets in ("embeddings", "ids"):
        manifest = spool(tmp_path / targets, records, held_out=records[:2], targets=targets, negatives=9)
        found = False
        for shard in manifest.shards:
            for tensor in _tensors(tmp_path / targets, shard).values():
                if not tensor.dtype.is_floating_point:
                    values = tensor.flatten().tolist()
                    for example in records:
                        found |= _appears(list(example.prefix), values) or _appears(list(example.targets), values)
            with safe_open(shard_path(tmp_path / targets, shard.sha256), "pt") as file:
                assert file.metadata() == {"part": shard.part}
        assert found == (targets == "ids")


def test_ids_are_sent_without_a_table(tmp_path: Path) -> None:
    records = some_records(5)
    manifest = spool(tmp_path, records, targets="ids")
    assert [shard.part for shard in manifest.shards] == ["train"]
    targets = _tensors(tmp_path, manifest.shards[0])["targets_N"].tolist()
    assert targets == [token for example in records for token in example.targets]
    assert check_shard(shard_path(tmp_path, manifest.shards[0].sha256), limits(targets="ids")).max_index == -1


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("alike", [False, True])
def test_files_are_as_large_as_the_formula_says(tmp_path: Path, encoding: Encoding, alike: bool) -> None:
    D = 64
    records = [
        record([7 * alike + i * (not alike), *((i * t) % VOCAB for t in range(40))], range(0, 41, 3), range(14), D)
        for i in range(80)
    ]
    manifest = spool(tmp_path, records, encoding=encoding, negatives=60)
    shards = {part: [shard for shard in manifest.shards if shard.part == part] for part in ("train", "table")}
    train = shards["train"]
    payload = record_bytes(
        encoding,
        D,
        rows=sum(shard.rows for shard in train),
        tokens=80 * 41,
        examples=80,
        targets=80 * 14,
        shared=alike,
        table_rows=14,
        negatives=60,
        shards=len(train),
    )
    on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert (train[0].rows < train[0].tokens) == alike
    headers = len(manifest.shards) * 800
    assert payload < on_disk < payload + headers
    assert on_disk == pytest.approx(payload, rel=0.01)


def test_memory_holds_one_shard_however_many_records_come(tmp_path: Path) -> None:
    def endless(count: int) -> Iterator[Record]:
        for i in range(count):
            x_TD = torch.full((50, 64), float(i))
            yield Record(x_TD, tuple((i * 50 + t) for t in range(50)), (0,), (i % 90,))

    def peak(count: int) -> int:
        tracemalloc.start()
        shards = 0
        writing = write_records(
            endless(count), tmp_path, part="train", encoding="bf16", table=TargetTable(), shard_bytes=100_000
        )
        for _ in writing:
            shards += 1
        assert shards > count // 20
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    assert peak(400) < 1.3 * peak(100)


def test_an_example_larger_than_a_shard_is_named_with_its_length(tmp_path: Path) -> None:
    records = [record([1, 2], [0], [4]), record([t % VOCAB for t in range(3000)], [0], [4])]
    with pytest.raises(BadInput, match=r"Example 2 of train has 3001 tokens, .* lower data\.max_length"):
        _written(tmp_path, records, shard_bytes=65_536)


def test_activations_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    broken = record([1, 2], [0], [4])
    broken.x_TD[1, 3] = float("nan")
    with pytest.raises(BadInput, match="NaN"):
        _written(tmp_path, [broken])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("positions", "targets"), [([], []), ([2], [1]), ([1, 0], [1, 1]), ([0], [1, 2])])
def test_records_that_contradict_themselves_are_refused(
    tmp_path: Path, positions: list[int], targets: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"of 2|2 ids"):
        _written(tmp_path, [record([1, 2], positions, targets)])


def test_a_full_disk_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("potluck.models.durable.sync", full)
    with pytest.raises(SaveFailed, match="cannot take more: the disk is full"):
        _written(tmp_path, some_records(3))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_rows_of_a_table_are_cut_into_shards_in_order(tmp_path: Path, encoding: Encoding) -> None:
    rows = table_of(45)
    asked: list[int] = []

    def read(ids: list[int]) -> Tensor:
        asked.append(len(ids))
        return rows[ids]

    ids = draw_negatives(VOCAB, 80, seed=3)
    shards = [*write_rows(ids, read, tmp_path, part="negatives", encoding=encoding, shard_bytes=4096)]  # type: ignore[arg-type]
    assert len(shards) > 1
    assert max(asked) < 80
    assert sum(shard.rows for shard in shards) == 80
    assert all(shard.bytes <= 4096 for shard in shards)
    if encoding == "fp32":
        assert torch.equal(torch.cat([_tensors(tmp_path, shard)["rows_UD"] for shard in shards]), rows[ids])


@given(st.integers(1, 500), st.integers(0, 600), st.integers(0, 99))
def test_negatives_are_distinct_tokens(vocab_size: int, count: int, seed: int) -> None:
    drawn = draw_negatives(vocab_size, count, seed)
    assert len(drawn) == len(set(drawn)) == min(count, vocab_size)
    assert all(0 <= token < vocab_size for token in drawn)
    assert drawn == draw_negatives(vocab_size, count, seed)


def test_negatives_are_uniform() -> None:
    counts = torch.zeros(20)
    for seed in range(2000):
        counts[draw_negatives(20, 5, seed)] += 1
    assert float(counts.min()) > 420
    assert float(counts.max()) < 580


Change = Callable[[dict[str, Tensor]], object]


def _set(name: str, index: object, value: float) -> Change:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name][index] = value  # type: ignore[index]

    return change


REFUSED: list[tuple[Encoding, Change, str]] = [
    ("fp32", _set("x_RD", (3, 4), float("nan")), "x_RD holds NaN"),
    ("bf16", _set("x_RD", (3, 4), float("-inf")), "x_RD holds NaN"),
    ("int8", _set("scale_RG", (2, 0), float("inf")), "scale_RG holds NaN"),
    ("int8", _set("scale_RG", (2, 0), 3e38), "a value beyond"),
    ("int4", _set("outlier_RC", (2, 1), float("nan")), "outlier_RC holds NaN"),
    ("int8", _set("outliers_C", 0, -1), "outliers_C are not ascending channels"),
    ("int8", _set("outliers_C", 3, 45), "outliers_C are not ascending channels"),
    ("int8", _set("outliers_C", 1, 0), "outliers_C are not ascending channels"),
    ("int4", _set("q_RH", (0, -1), 0x11), "q_RH does not hold 45 channels"),
    ("int8", _set("lengths_B", 0, 0), "lengths are not positive"),
    ("int8", _set("lengths_B", 0, -5), "lengths are not positive"),
    ("int8", _set("lengths_B", 0, 2_147_483_647), "do not sum to"),
    ("int8", _set("rows_T", 0, -1), "rows_T points outside"),
    ("int8", _set("rows_T", -1, 10**6), "rows_T points outside"),
    ("int8", _set("targets_N", 0, -1), "target index -1"),
    ("int8", _set("targets_N", 0, VOCAB), f"target index {VOCAB}"),
    ("int8", _set("supervised", 0, 0), "supervised positions"),
    ("int8", _set("supervised", -1, 255), "supervise|targets for"),
    ("int8", lambda tensors: tensors.pop("targets_N"), "no tensor targets_N"),
    ("int8", lambda tensors: tensors.pop("scale_RG"), "lacks scale_RG"),
    ("int8", lambda tensors: tensors.pop("supervised"), "lacks supervised"),
    ("int8", lambda tensors: tensors.pop("q_RD"), "no tensor x_RD or q_RD"),
    ("int8", lambda tensors: tensors.update(more=torch.ones(2)), "1 tensors that do not belong"),
    ("int8", lambda tensors: tensors.update(q_RD=tensors["q_RD"][:, :-1].clone()), "q_RD is"),
    ("int8", lambda tensors: tensors.update(q_RD=tensors["q_RD"].view(torch.uint8)), "q_RD is"),
    ("int8", lambda tensors: tensors.update(targets_N=tensors["targets_N"][:-1].clone()), "targets for"),
    ("int8", lambda tensors: tensors.update(targets_N=tensors["targets_N"].long()), "targets_N is"),
    ("int8", lambda tensors: tensors.update(targets_N=torch.tensor(3, dtype=torch.int32)), "no tensor targets_N"),
    ("int8", lambda tensors: tensors.update(lengths_B=torch.empty(0, dtype=torch.int32)), "is empty"),
]


def _broken(directory: Path, encoding: Encoding, change: Change) -> Path:
    [shard] = _written(directory, some_records(15), encoding)
    tensors = {name: tensor.clone() for name, tensor in _tensors(directory, shard).items()}
    change(tensors)
    path = directory / "broken"
    path.write_bytes(save(tensors, metadata={"part": "train"}))
    return path


@pytest.mark.parametrize(("encoding", "change", "told"), REFUSED)
def test_a_broken_shard_is_refused_with_what_is_wrong(
    tmp_path: Path, encoding: Encoding, change: Change, told: str
) -> None:
    assert check_shard(_broken(tmp_path, encoding, lambda tensors: None), limits(encoding)).examples == 15
    with pytest.raises(BadInput, match=told) as refused:
        check_shard(_broken(tmp_path, encoding, change), limits(encoding))
    assert str(tmp_path) not in str(refused.value)


def test_an_example_without_targets_or_too_long_is_refused(tmp_path: Path) -> None:
    long = [record([t % VOCAB for t in range(65)], [0], [4])]
    [shard] = _written(tmp_path, long)
    with pytest.raises(BadInput, match="Example 0 of the shard has 65 positions; at most 64"):
        check_shard(shard_path(tmp_path, shard.sha256), limits())

    def moved(tensors: dict[str, Tensor]) -> None:
        tensors["lengths_B"][:] = torch.tensor([1, 3])

    [shard] = _written(tmp_path, [record([1, 2], [1], [4]), record([2, 1], [1], [5])])
    tensors = _tensors(tmp_path, shard)
    moved(tensors)
    (tmp_path / "moved").write_bytes(save(tensors, metadata={"part": "train"}))
    with pytest.raises(BadInput, match="Example 0 of the shard has no supervised position"):
        check_shard(tmp_path / "moved", limits())


@pytest.mark.parametrize("part", ["table", "negatives"])
def test_a_table_is_checked_too(tmp_path: Path, part: str) -> None:
    rows = {"q_UD": torch.ones(4, 45, dtype=torch.int8), "scale_U": torch.ones(4, dtype=torch.bfloat16)}
    path = tmp_path / "table"
    path.write_bytes(save(rows, metadata={"part": part}))
    assert check_shard(path, limits()).rows == 4
    with pytest.raises(BadInput, match="targets are ids here"):
        check_shard(path, limits(targets="ids"))
    with pytest.raises(BadInput, match="q_UD is"):
        check_shard(path, limits(D=44))
    with pytest.raises(BadInput, match="lacks rows_UD"):
        check_shard(path, limits("bf16"))
    rows["scale_U"][2] = float("nan")
    path.write_bytes(save(rows, metadata={"part": part}))
    with pytest.raises(BadInput, match="scale_U holds NaN"):
        check_shard(path, limits())


def _header(content: object) -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return len(text).to_bytes(8, "little") + text


GARBAGE = [
    b"",
    b"\x00" * 7,
    b"\xff" * 500,
    b"version https://git-lfs.github.com/spec/v1\n",
    _header(b"[" * 50_000),
    _header(b"{" + b" " * 70_000 + b"}"),
    _header(b"\xff\xfe"),
    _header([]),
    _header({}),
    _header({"__metadata__": {"part": ["train"]}}),
    _header({"__metadata__": {"part": "other"}}),
    _header({"__metadata__": {"part": "train"}}),
    _header({"__metadata__": {"part": "train"}, "x_RD": 3}),
    _header({"__metadata__": {"part": "train"}, "x_RD": {"dtype": [], "shape": [], "data_offsets": [0, 4]}}),
    _header(
        b'{"__metadata__":{"part":"train"},"x_RD":{"dtype":"F32","shape":[Infinity],"data_offsets":[0,4]}}',
    ),
    _header({"__metadata__": {"part": "train"}, "x_RD": {"dtype": "F32", "shape": [9, 9], "data_offsets": [0, 324]}}),
]


@pytest.mark.parametrize("content", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        check_shard(path, limits("fp32"))
    assert str(tmp_path) not in str(refused.value)


def test_what_a_header_says_is_told_without_control_sequences(tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    entry = {"dtype": "\x1b[2J", "shape": [1], "data_offsets": [0, 4]}
    path.write_bytes(_header({"__metadata__": {"part": "train"}, "x\x1b]0;y\x07": entry}) + bytes(4))
    with pytest.raises(BadInput, match="has dtype") as refused:
        check_shard(path, limits("fp32"))
    assert str(refused.value).isprintable()


def test_any_damage_is_refused_or_changes_only_values(tmp_path: Path) -> None:
    """Cut short anywhere, or with any byte of header and small tensors changed, a shard never breaks its reader."""
    [shard] = _written(tmp_path, some_records(10))
    content = shard_path(tmp_path, shard.sha256).read_bytes()
    path = tmp_path / "damaged"
    draw = random.Random(5)
    for _ in range(300):
        damaged = bytearray(content)
        if draw.random() < 0.3:
            del damaged[draw.randrange(len(content)) :]
        else:
            damaged[draw.choice([draw.randrange(900), draw.randrange(len(content))])] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            info = check_shard(path, limits())
        except BadInput:
            continue
        assert len(damaged) == len(content)
        assert info.rows == shard.rows
