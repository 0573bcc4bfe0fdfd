"""A model fetched by ranges: exact bytes, kept between runs, shared by processes."""

import errno
import hashlib
import multiprocessing
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import save_tiny, word_tokenizer

from potluck.chain.ranges import Ranges
from potluck.errors import BadInput, PotluckError, SaveFailed
from potluck.models.checkpoint import Checkpoint
from potluck.models.fetched import Fetched
from potluck.texts.tokenizer import load_tokenizer

HEADER_AND_PREFIX = 8
EMBEDDING, DOWN = "model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"


class Source:
    """A directory that hands out ranges and remembers them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.asked: list[tuple[str, list[tuple[int, int]]]] = []

    @property
    def listing(self) -> list[dict[str, Any]]:
        contents = {path.name: path.read_bytes() for path in sorted(self.directory.iterdir())}
        return [
            {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            for name, content in contents.items()
        ]

    def fetch(self, name: str, runs: list[tuple[int, int]]) -> Iterator[bytes]:
        self.asked.append((name, runs))
        content = (self.directory / name).read_bytes()
        joined = b"".join(content[offset : offset + length] for offset, length in runs)
        for start in range(0, len(joined), 1000):
            yield joined[start : start + 1000]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny(tmp_path_factory.mktemp("model"))
    word_tokenizer(20).save_pretrained(directory)
    return directory


def header_bytes(directory: Path) -> int:
    with (directory / "model.safetensors").open("rb") as handle:
        return HEADER_AND_PREFIX + int.from_bytes(handle.read(8), "little")


def test_a_share_costs_its_bytes_and_the_next_run_none(model: Path, tmp_path: Path) -> None:
    source = Source(model)
    rows, columns = Ranges(((3, 7), (20, 31))), Ranges(((0, 5), (40, 44)))
    for first in (True, False):
        fetched = Fetched(tmp_path, source.listing, source.fetch)
        fetched.fetch_small()
        small = fetched.bytes_fetched
        assert small == (sum(f["size"] for f in source.listing if f["name"] != "model.safetensors") if first else 0)
        assert len(load_tokenizer(fetched.directory)) == 23
        with Checkpoint.open(fetched.directory, fetched.need) as checkpoint, Checkpoint.open(model) as whole:
            assert torch.equal(checkpoint.read(EMBEDDING, rows=rows), whole.read(EMBEDDING, rows=rows))
            assert torch.equal(checkpoint.read(DOWN, columns=columns), whole.read(DOWN, columns=columns))
            half = checkpoint.read(DOWN, columns=columns, dtype=torch.bfloat16)
            assert torch.equal(half, whole.read(DOWN, columns=columns, dtype=torch.bfloat16))
            share = (len(rows) * 32 + 32 * len(columns)) * 4
        assert fetched.bytes_fetched - small == (share + header_bytes(model) if first else 0)


def test_an_owner_fetches_the_whole_table_before_it_reads_rows(model: Path, tmp_path: Path) -> None:
    source = Source(model)
    fetched = Fetched(tmp_path, source.listing, source.fetch)
    with Checkpoint.open(fetched.directory, fetched.need) as checkpoint, Checkpoint.open(model) as whole:
        checkpoint.fetch([(EMBEDDING, None, None)])
        assert checkpoint.bytes_read == 0
        asked, before = list(source.asked), fetched.bytes_fetched
        assert before == header_bytes(model) + 64 * 32 * 4
        assert torch.equal(checkpoint.rows(EMBEDDING, [5, 9, 5]), whole.rows(EMBEDDING, [5, 9, 5]))
        assert source.asked == asked
        whole.fetch([(EMBEDDING, None, None)])
        with pytest.raises(BadInput, match="no tensor lm_head"):
            checkpoint.fetch([("lm_head", None, None)])


def test_a_sharded_checkpoint(model: Path, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(model).save_pretrained(tmp_path / "sharded", max_shard_size="20kB")
    source = Source(tmp_path / "sharded")
    fetched = Fetched(tmp_path / "cache", source.listing, source.fetch)
    with Checkpoint.open(fetched.directory, fetched.need) as checkpoint, Checkpoint.open(model) as whole:
        assert checkpoint.names == whole.names
        for name in whole.names:
            assert torch.equal(checkpoint.read(name), whole.read(name))


RUNS = st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 500)), max_size=8)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(needs=st.lists(RUNS, max_size=4))
def test_only_what_is_missing_is_fetched_and_it_is_right(
    tmp_path_factory: pytest.TempPathFactory, needs: list[list[tuple[int, int]]]
) -> None:
    root = tmp_path_factory.mktemp("case")
    (root / "source").mkdir()
    content = os.urandom(2500)
    (root / "source" / "config.json").write_bytes(content)
    source = Source(root / "source")
    fetched = Fetched(root / "cache", source.listing, source.fetch)
    held: set[int] = set()
    for runs in needs:
        fetched.need("config.json", runs)
        held |= {i for offset, length in runs for i in range(offset, offset + length)}
        assert fetched.bytes_fetched == len(held)
        present = (fetched.directory / "config.json").read_bytes()
        assert all(present[i] == content[i] for i in held)
        assert len(present) == 2500
    for _, asked in source.asked:
        assert all(b > a + n for (a, n), (b, _) in pairwise(asked)), "neighbours are merged"


def test_what_arrives_otherwise_than_announced_is_refused_and_fetched_anew(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text("{}")
    source = Source(tmp_path / "source")
    listing = source.listing
    (tmp_path / "source" / "config.json").write_text("[]")
    fetched = Fetched(tmp_path / "cache", listing, source.fetch)
    with pytest.raises(BadInput, match=r"config\.json did not arrive as it was announced"):
        fetched.whole("config.json")
    (tmp_path / "source" / "config.json").write_text("{}")
    assert fetched.whole("config.json").read_text() == "{}"
    assert fetched.bytes_fetched == 4


@pytest.mark.parametrize("wrong", [b"", b"123", b"12345"])
def test_too_few_or_too_many_bytes_are_not_taken(tmp_path: Path, wrong: bytes) -> None:
    listing = [{"name": "config.json", "size": 10, "sha256": "0" * 64}]
    fetched = Fetched(tmp_path, listing, lambda name, runs: iter([wrong]))
    with pytest.raises(PotluckError, match="came"):
        fetched.need("config.json", [(2, 4)])
    right = Fetched(tmp_path, listing, lambda name, runs: iter([b"1234"]))
    right.need("config.json", [(2, 4)])
    assert right.bytes_fetched == 4


def test_a_crash_before_the_data_are_listed_loses_only_them(tmp_path: Path) -> None:
    listing = [{"name": "config.json", "size": 10, "sha256": "0" * 64}]

    def cut(name: str, runs: list[tuple[int, int]]) -> Iterator[bytes]:
        yield b"12"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Fetched(tmp_path, listing, cut).need("config.json", [(0, 4)])
    again = Fetched(tmp_path, listing, lambda name, runs: iter([b"abcd"]))
    again.need("config.json", [(0, 4)])
    assert again.bytes_fetched == 4
    sidecar = tmp_path / "content" / ("0" * 64 + ".present.npy")
    for damage in (b"", b"nonsense", sidecar.read_bytes()[:-3]):
        sidecar.write_bytes(damage)
        anew = Fetched(tmp_path, listing, lambda name, runs: iter([b"abcd"]))
        anew.need("config.json", [(0, 4)])
        assert anew.bytes_fetched == 4
    (tmp_path / "content" / ("0" * 64)).write_bytes(b"short")
    anew = Fetched(tmp_path, listing, lambda name, runs: iter([b"abcd"]))
    anew.need("config.json", [(0, 4)])
    assert anew.bytes_fetched == 4


def test_a_full_disk_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = [{"name": "config.json", "size": 10, "sha256": "0" * 64}]
    fetched = Fetched(tmp_path, listing, lambda name, runs: iter([b"1234"]))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(SaveFailed, match="is full: make room"):
        fetched.need("config.json", [(0, 4)])
    (tmp_path / "file").touch()
    with pytest.raises(SaveFailed, match="cannot be kept in"):
        Fetched(tmp_path / "file" / "cache", listing, fetched._fetch)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "../config.json", "size": 1, "sha256": "0" * 64},
        {"name": ".", "size": 1, "sha256": "0" * 64},
        {"name": "a\n", "size": 1, "sha256": "0" * 64},
        {"name": "a", "size": -1, "sha256": "0" * 64},
        {"name": "a", "size": 1, "sha256": "../" + "0" * 61},
        {"name": "a", "size": "1", "sha256": "0" * 64},
        {},
    ],
)
def test_a_listing_cannot_lead_out_of_the_cache(tmp_path: Path, entry: dict[str, Any]) -> None:
    with pytest.raises(BadInput):
        Fetched(tmp_path, [entry], lambda name, runs: iter([]))
    assert not any(tmp_path.iterdir())


def test_what_is_not_there_is_told(model: Path, tmp_path: Path) -> None:
    source = Source(model)
    fetched = Fetched(tmp_path, source.listing, source.fetch)
    with pytest.raises(BadInput, match=r"weights\.bin is no file of this model, which has .*config\.json"):
        fetched.need("weights.bin", [(0, 1)])
    size = (model / "config.json").stat().st_size
    with pytest.raises(BadInput, match=f"lie outside config.json, which has {size}"):
        fetched.need(fetched.directory / "config.json", [(size - 1, 2)])
    assert fetched.bytes_fetched == 0


def _fetch_in_child(model: Path, cache: Path, start: int, counts: "multiprocessing.Queue[int]") -> None:
    source = Source(model)
    fetched = Fetched(cache, source.listing, source.fetch)
    size = (model / "model.safetensors").stat().st_size
    for i in range(start, size - 300, 1000):
        fetched.need("model.safetensors", [(i, 300)])
    counts.put(fetched.bytes_fetched)


def test_two_processes_share_the_cache(model: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    counts: multiprocessing.Queue[int] = context.Queue()
    children = [context.Process(target=_fetch_in_child, args=(model, tmp_path, start, counts)) for start in (0, 100)]
    for child in children:
        child.start()
    total = sum(counts.get(timeout=60) for _ in children)
    for child in children:
        child.join(timeout=60)
    size = (model / "model.safetensors").stat().st_size
    wanted = {i for start in (0, 100) for at in range(start, size - 300, 1000) for i in range(at, at + 300)}
    assert total == len(wanted)
    source = Source(model)
    third = Fetched(tmp_path, source.listing, source.fetch)
    third.need("model.safetensors", [(at, 400) for at in range(0, size - 400, 1000)])
    assert third.bytes_fetched == 0
    got, content = (third.directory / "model.safetensors").read_bytes(), (model / "model.safetensors").read_bytes()
    assert all(got[i] == content[i] for i in wanted)
