"""One job, every strategy: the same losses, and the same result on disk."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges, split_by
from potluck.job import Job
from potluck.models.adapter import read_tensors
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_for, read_config
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.trainer import train
from word_model import WORDS, save_rows, save_word_model
from worlds import run_world

HEADS, COLUMNS, ROWS, NONE = Ranges.of(0, 6), Ranges.of(0, 64), Ranges.of(0, len(WORDS)), Ranges(())
WHOLE = (HEADS, COLUMNS, ROWS)

PLANS = {
    "single": Plan("single", (DeviceShare("a", *WHOLE),)),
    "tensor": Plan(
        "tensor",
        tuple(
            DeviceShare(name, *shares)
            for name, *shares in zip(
                "abc", split_by([3, 2, 1]), split_by([40, 0, 24]), split_by([2, 9, 1]), strict=True
            )
        ),
    ),
    "pipeline": Plan(
        "pipeline",
        (
            DeviceShare("a", HEADS, COLUMNS, NONE, Ranges.of(1, 2)),
            DeviceShare("b", HEADS, COLUMNS, ROWS, Ranges.of(2, 4)),
            DeviceShare("c", HEADS, COLUMNS, NONE, Ranges.of(0, 1)),
        ),
        micro_batch_size=1,
    ),
    "data": Plan("data", tuple(DeviceShare(name, *WHOLE, speed=s) for name, s in [("a", 2.0), ("b", 1.0), ("c", 1.0)])),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("model"))


def trained(plan: Plan, model_dir: Path, directory: Path, **fields: Any) -> list[float]:
    """Losses of a run whose result is then in ``directory``."""
    directory.mkdir()
    job = Job.model_validate(
        {
            "model": str(model_dir),
            "data": {"train": str(save_rows(directory / "data.jsonl"))},
            "output": directory / "unused",
            "steps": 5,
            "batch_size": 3,
            "learning_rate": 0.02,
            "clip": 0.5,
            "dtype": "fp64",
            **fields,
        }
    )
    decoder = decoder_for(read_config(model_dir), job)
    told: list[dict[str, Any]] = []

    def body(comm: Comm) -> None:
        is_first = comm.rank == 0
        emit = told.append if is_first else lambda event: None
        train(job, plan, decoder, comm, model_dir, directory if is_first else None, emit, owns=is_first)

    run_world(len(plan.devices), body)
    return [event["loss"] for event in told if event["event"] == "step"]


FIELDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"train": "full", "micro_batch_size": 2},
    "embeddings": {"train": "full", "train_embeddings": True, "data_stays": False},
}


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
def test_every_strategy_trains_the_same(model_dir: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    losses = {name: trained(plan, model_dir, tmp_path / name, **fields) for name, plan in PLANS.items()}
    assert len(losses["single"]) == 5
    assert losses["single"][-1] < losses["single"][0]
    for name in PLANS:
        assert losses[name] == pytest.approx(losses["single"], abs=1e-9), name

    def result(name: str) -> dict[str, Tensor]:
        if "train" not in fields:
            return read_tensors(tmp_path / name)
        with Checkpoint.open(tmp_path / name) as checkpoint:
            return {each: checkpoint.read(each) for each in checkpoint.names}

    expected = result("single")
    for name in PLANS:
        found = result(name)
        assert set(found) == set(expected)
        for each, tensor in found.items():
            assert tensor.dtype == expected[each].dtype
            assert torch.allclose(tensor, expected[each], atol=1e-6), each
    assert any(float(tensor.abs().max()) > 0 for each, tensor in expected.items() if "lora_B" in each or fields)
