"""Bytes that a plan predicts for each device, against those that a step sends."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pool.profiles import job, profile, work
from pool.tiny import VOCAB, config, save_tiny
from potluck.chain.comm import Comm
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.pool.candidates import plans
from potluck.pool.cost import Prediction
from potluck.pool.measured_work import config_fields
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


def planned(strategy: str, owners: Sequence[str], stays: bool, fields: Mapping[str, Any]) -> tuple[Plan, Prediction]:
    shape = config("llama", num_hidden_layers=4)
    measured = work(config=config_fields(shape), rows=ROWS // 2 // len(owners), length=LENGTH)
    measured = measured.model_copy(update={"supervised": measured.rows * (LENGTH - 1)})
    pool = [profile(f"d{i}", speed=1 + i / 9, of=measured) for i in range(3)]
    found = plans(job(batch_size=ROWS, data_stays=stays, **fields), decoder_of(shape), measured, pool, owners[1:])
    (candidate,) = [c for c in found if c.strategy == strategy and c.feasible]
    assert candidate.plan is not None
    assert candidate.prediction is not None
    return candidate.plan, candidate.prediction


LORA: dict[str, Any] = {}
DORA: dict[str, Any] = {"lora": {"use_dora": True}}
DORA_OF_COLUMNS: dict[str, Any] = {"lora": {"use_dora": True, "targets": ["q_proj", "v_proj", "up_proj"]}}
IA3: dict[str, Any] = {"train": "ia3"}


@pytest.mark.parametrize(
    ("strategy", "owners", "stays", "fields"),
    [
        ("tensor-uniform", ["d0"], True, LORA),
        ("tensor-uniform", ["d0", "d2"], True, LORA),
        ("tensor-uniform", ["d0"], True, DORA_OF_COLUMNS),
        ("tensor-uniform", ["d0", "d2"], True, IA3),
        ("pipeline", ["d0"], False, LORA),
        ("pipeline", ["d0"], False, DORA),
        ("pipeline-uniform", ["d0", "d1"], False, LORA),
        ("data", ["d0"], False, LORA),
        ("data", ["d0"], False, DORA),
        ("data", ["d0"], False, IA3),
        ("data", ["d0", "d2"], True, LORA),
    ],
)
def test_as_many_bytes_as_predicted(
    strategy: str, owners: list[str], stays: bool, fields: dict[str, Any], model: Path
) -> None:
    plan, prediction = planned(strategy, owners, stays, fields)
    names = [device.name for device in plan.devices]
    the_job = job(**fields)
    size = rows_dealt_at_once(plan) or ROWS
    a_turn = padded(ROWS // len(owners))

    def parts(owner: int) -> list[Batch]:
        rows = micro_batches(range(len(a_turn.ids_BS)), size)
        return [padded(len(each)) for each in rows] if names[owner] in owners else []

    def body(comm: Comm) -> int:
        with Checkpoint.open(model) as checkpoint:
            decoder = decoder_of(config("llama", num_hidden_layers=4))
            part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float32, lora=the_job.adapter, seed=0)
            settings = Settings(steps=1, learning_rate=1e-3, clip=1.0)
            stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
            whose = [names.index(owner) for owner in owners]
            turns = [Turn(owner, parts(owner) if owner == comm.rank else None) for owner in whose]
            return stepper.step(turns).bytes_sent

    sent = run_world(len(names), body)
    for device, actual in zip(prediction.devices, sent, strict=True):
        # vectors are as small as layouts, norm and clocks, which are not counted
        uncounted = 8192 if strategy == "data" and the_job.train == "ia3" else 0
        assert device.bytes_sent == pytest.approx(actual, rel=0.1, abs=uncounted), (device.name, actual)
