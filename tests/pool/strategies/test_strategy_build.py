"""What a device holds by a plan, and what it fetches ahead for that: no less and no more than it reads."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pool.tiny import VOCAB, config, save_tiny
from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges
from potluck.job_sections import Lora
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.models.fetched import Fetched
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.step import Settings
from potluck.pool.strategies.build import part_for, prefetch_for, rows_dealt_at_once, strategy_for, tables_for
from potluck.pool.strategies.data import DataParallel
from potluck.pool.strategies.pipeline import Pipeline
from potluck.pool.strategies.tensor import TensorParallel
from worlds import run_world

HEADS, COLUMNS, ROWS = Ranges.of(0, 9), Ranges.of(0, 26), Ranges.of(0, VOCAB)
NONE = Ranges(())
PLANS = {
    "tensor": Plan(
        "tensor",
        (
            DeviceShare("a", Ranges.of(0, 5), Ranges.of(0, 20), ROWS),
            DeviceShare("b", Ranges.of(5, 9), NONE, NONE),
            DeviceShare("c", NONE, Ranges.of(20, 26), NONE),
        ),
    ),
    "pipeline": Plan(
        "pipeline",
        (
            DeviceShare("a", HEADS, COLUMNS, NONE, Ranges.of(1, 2)),
            DeviceShare("b", HEADS, COLUMNS, ROWS, Ranges.of(2, 4)),
            DeviceShare("c", HEADS, COLUMNS, NONE, Ranges.of(0, 1)),
        ),
        micro_batch_size=2,
    ),
    "data": Plan(
        "data", tuple(DeviceShare(name, HEADS, COLUMNS, ROWS, speed=1.0) for name in "abc"), micro_batch_size=2
    ),
}
KINDS = {"tensor": TensorParallel, "pipeline": Pipeline, "data": DataParallel}

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(config("llama", tie_word_embeddings=False), tmp_path_factory.mktemp("model"))


def listing(directory: Path) -> list[dict[str, Any]]:
    return [
        {"name": f.name, "size": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in directory.iterdir()
    ]


@pytest.mark.parametrize("owns", [False, True], ids=["no data", "owner"])
@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("name", PLANS)
def test_after_it_a_device_asks_for_nothing(
    model: Path, tmp_path: Path, name: str, rank: int, lora: Lora | None, owns: bool
) -> None:
    decoder, plan = decoder_of(config("llama", tie_word_embeddings=False)), PLANS[name]

    def fetch(file: str, runs: list[tuple[int, int]]) -> Iterator[bytes]:
        content = (model / file).read_bytes()
        yield b"".join(content[offset : offset + length] for offset, length in runs)

    fetched = Fetched(tmp_path / "cache", listing(model), fetch)
    with Checkpoint.open(fetched.directory, fetched.need) as checkpoint:
        headers = fetched.bytes_fetched
        prefetch_for(plan, rank, checkpoint, decoder, lora, owns=owns, progress=lambda done, total: None)
        there = fetched.bytes_fetched
        part = part_for(plan, rank, checkpoint, decoder, compute=torch.float64, adapter=lora, seed=0)
        looked_up = tables_for(plan, rank, decoder, owns=owns)
        if EMBEDDING in looked_up:
            part.embedding(torch.arange(VOCAB)[None], torch.float64)
        if HEAD in looked_up:
            part.target_rows([*range(VOCAB)])
        assert fetched.bytes_fetched == there
        adapters = sum(t.local.nbytes for t in part.chain.trained) if lora else 0
        table = checkpoint.shape(HEAD)[0] * checkpoint.shape(HEAD)[1] * 8
        tables = table * len(looked_up) - (part.head.W_VD.nbytes if HEAD in looked_up else 0)
        assert there - headers == part.weight_bytes - adapters + tables


def test_tables_are_fetched_by_those_who_see_ids() -> None:
    untied, tied = (decoder_of(config("llama", tie_word_embeddings=each)) for each in (False, True))

    def of_all(name: str, owner: int | None, decoder: Any = untied) -> list[tuple[str, ...]]:
        return [tables_for(PLANS[name], rank, decoder, owns=rank == owner) for rank in range(3)]

    assert of_all("tensor", 1) == [(), (EMBEDDING, HEAD), ()]
    assert of_all("tensor", 1, tied) == [(), (EMBEDDING,), ()]
    assert of_all("pipeline", 0) == of_all("pipeline", 2) == [(), (), (EMBEDDING,)]
    assert of_all("data", 0) == [(EMBEDDING, HEAD)] * 3


@pytest.mark.parametrize("name", PLANS)
def test_each_plan_is_walked_its_own_way(model: Path, name: str) -> None:
    decoder, plan = decoder_of(config("llama", tie_word_embeddings=False)), PLANS[name]

    def body(comm: Comm) -> type:
        with Checkpoint.open(model) as checkpoint:
            part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float32, adapter=Lora(), seed=0)
        return type(strategy_for(plan, part, comm, Settings(steps=1, learning_rate=0.1)))

    assert run_world(3, body) == [KINDS[name]] * 3


def test_data_deals_the_rows_of_a_turn_itself() -> None:
    assert [rows_dealt_at_once(plan) for plan in PLANS.values()] == [None, 2, None]
