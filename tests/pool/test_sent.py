"""Bytes that a plan predicts for each device, against those that a step sends."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pool.profiles import job, profile, work
from pool.tiny import VOCAB, config, save_tiny
from potluck.chain.comm import Comm
from potluck.job import Job
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_for
from potluck.models.families.fields import fields_of
from potluck.pool.candidates import plans
from potluck.pool.cost import Prediction
from potluck.pool.plan import Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.build import part_for, rows_dealt_at_once, strategy_for
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch, Layout
from potluck.texts.order import micro_batches
from worlds import run_world

ROWS, LENGTH = 8, 48


def padded(rows: int) -> Batch:
    ids_BS = torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    layout = Layout((LENGTH,) * rows, (tuple(range(LENGTH - 1)),) * rows)
    return Batch(ids_BS, ids_BS[:, 1:].flatten(), layout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(config("llama", num_hidden_layers=4), tmp_path_factory.mktemp("model"))


def planned(the_job: Job, strategy: str, owners: Sequence[str], tied: bool = True) -> tuple[Plan, Prediction]:
    shape = config("llama", num_hidden_layers=4, tie_word_embeddings=tied)
    measured = work(config=fields_of(shape), rows=ROWS // 2 // len(owners), length=LENGTH, train=the_job.train)
    measured = measured.model_copy(update={"supervised": measured.rows * (LENGTH - 1)})
    pool = [profile(f"d{i}", speed=1 + i / 9, of=measured) for i in range(3)]
    found = plans(the_job, decoder_for(shape, the_job), measured, pool, owners[1:])
    (candidate,) = [c for c in found if c.strategy == strategy and c.feasible]
    assert candidate.plan is not None
    assert candidate.prediction is not None
    return candidate.plan, candidate.prediction


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("frozen", [0, 2, 3])
@pytest.mark.parametrize(
    ("strategy", "owners", "stays"),
    [
        ("tensor-uniform", ["d0"], True),
        ("tensor-uniform", ["d0", "d2"], True),
        ("pipeline", ["d0"], False),
        ("pipeline-uniform", ["d0", "d1"], False),
        ("data", ["d0"], False),
        ("data", ["d0", "d2"], True),
    ],
)
def test_as_many_bytes_as_predicted(
    strategy: str, owners: list[str], stays: bool, frozen: int, train: str, model: Path
) -> None:
    check(job(batch_size=ROWS, data_stays=stays, frozen_blocks=frozen, train=train), strategy, owners, model)


DORA: dict[str, Any] = {"lora": {"use_dora": True}}
DORA_OF_COLUMNS: dict[str, Any] = {"lora": {"use_dora": True, "targets": ["q_proj", "v_proj", "up_proj"]}}
IA3: dict[str, Any] = {"train": "ia3"}


@pytest.mark.parametrize(
    ("strategy", "owners", "stays", "fields"),
    [
        ("tensor-uniform", ["d0"], True, DORA_OF_COLUMNS),
        ("tensor-uniform", ["d0", "d2"], True, IA3),
        ("pipeline", ["d0"], False, DORA),
        ("data", ["d0"], False, DORA),
        ("data", ["d0"], False, IA3),
    ],
)
def test_as_many_with_adapters_of_other_kinds(
    strategy: str, owners: list[str], stays: bool, fields: dict[str, Any], model: Path
) -> None:
    check(job(batch_size=ROWS, data_stays=stays, **fields), strategy, owners, model)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("strategy", "owners"),
    [
        ("tensor-uniform", ["d0"]),
        ("pipeline", ["d0"]),
        ("pipeline-uniform", ["d0", "d1"]),
        ("data", ["d0"]),
    ],
)
def test_as_many_where_embeddings_are_trained(strategy: str, owners: list[str], tied: bool, tmp_path: Path) -> None:
    directory = save_tiny(config("llama", num_hidden_layers=4, tie_word_embeddings=tied), tmp_path)
    the_job = job(batch_size=ROWS, data_stays=False, train="full", train_embeddings=True)
    check(the_job, strategy, owners, directory, tied=tied)


def check(the_job: Job, strategy: str, owners: list[str], model: Path, *, tied: bool = True) -> None:
    plan, prediction = planned(the_job, strategy, owners, tied)
    names = [device.name for device in plan.devices]
    size = rows_dealt_at_once(plan) or ROWS
    a_turn = padded(ROWS // len(owners))

    def parts(owner: int) -> list[Batch]:
        rows = micro_batches(range(len(a_turn.ids_BS)), size)
        return [padded(len(each)) for each in rows] if names[owner] in owners else []

    def body(comm: Comm) -> int:
        with Checkpoint.open(model) as checkpoint:
            decoder = decoder_for(config("llama", num_hidden_layers=4, tie_word_embeddings=tied), the_job)
            part = part_for(
                plan,
                comm.rank,
                checkpoint,
                decoder,
                compute=torch.float32,
                adapter=the_job.adapter,
                seed=0,
                train_embeddings=the_job.train_embeddings,
            )
            settings = Settings(steps=1, learning_rate=1e-3, clip=1.0)
            stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
            whose = [names.index(owner) for owner in owners]
            turns = [Turn(owner, parts(owner) if owner == comm.rank else None) for owner in whose]
            return stepper.step(turns).bytes_sent

    sent = run_world(len(names), body)
    for device, actual in zip(prediction.devices, sent, strict=True):
        # layouts, norms and clocks, which are not counted, are a few KiB
        assert device.bytes_sent == pytest.approx(actual, rel=0.1, abs=8000), (device.name, actual, device.bytes_sent)
