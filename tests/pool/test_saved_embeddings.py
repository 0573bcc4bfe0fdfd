"""Trained embeddings as they are saved: stock transformers loads them and says what the pool said; a table once."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pool.alike import pipeline_plan, tensor_plan, whole_of
from pool.plain import exact_norms
from pool.sequences import description, logits_of, save_base, sequence_batch, sequence_steps, tiny_config
from pool.sequences import loss_of as sequence_loss_of
from pool.test_saved import UNSEEN, logits, loss_of, stock
from pool.test_saved_sequences import stock as stock_classifier
from pool.test_train_embeddings import NARROW, WIDE
from pool.tiny import config, save_tiny, three_steps
from potluck.chain.comm import Comm
from potluck.job import Job
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.models.families.decoder import Decoder
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.step import OWNER, Stepper
from potluck.pool.strategies.build import part_for, strategy_for
from potluck.pool.trainer import save, settings_of
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch
from worlds import run_world


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_norms():
        yield


def train_and_save(
    base: Path, result: Path, plan: Plan, decoder: Decoder, steps: list[list[Batch]], unseen: Batch, **fields: object
) -> float:
    """The loss of the pool's own model on what it has not seen, after training."""
    result.mkdir()
    trains = {"train": "full", "train_embeddings": True, "data_stays": False, "learning_rate": 0.05}
    job = Job.model_validate({"model": str(base), "data": {"train": "unused"}, "output": "out", **trains, **fields})

    def body(comm: Comm) -> float:
        with Checkpoint.open(base) as checkpoint:
            part = part_for(
                plan, comm.rank, checkpoint, decoder, compute=torch.float64, adapter=None, seed=0, train_embeddings=True
            )
            settings = settings_of(job, 2)
            stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
            for batches in steps:
                stepper.step([Turn(OWNER, batches if comm.rank == OWNER else None)])
            save(job, stepper.strategy.whole(), comm.rank, checkpoint, decoder, base, result)
            return stepper.accumulate([Turn(OWNER, [unseen] if comm.rank == OWNER else None)]).loss

    return run_world(len(plan.devices), body, wire=torch.float64)[0]


def changed(base: Path, result: Path) -> set[str]:
    """Names of the tensors that are not as they were, of two checkpoints in one file each."""
    before, after = (load_file(directory / "model.safetensors") for directory in (base, result))
    assert {name: t.dtype for name, t in before.items()} == {name: t.dtype for name, t in after.items()}
    return {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}


@pytest.mark.parametrize("strategy", ["tensor", "pipeline", "data"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_stock_transformers_says_what_the_pool_said(tmp_path: Path, family: str, tied: bool, strategy: str) -> None:
    cfg = config(family, tie_word_embeddings=tied)
    base, decoder = save_tiny(cfg, tmp_path / "base"), decoder_of(cfg)
    plans = {
        "tensor": tensor_plan(*(NARROW if family == "gemma3" else WIDE)["3"]),
        "pipeline": pipeline_plan(decoder, [(1, 1), (0, 3)]),
        "data": Plan("data", tuple(DeviceShare(name, *whole_of(decoder), speed=1.0) for name in "ab")),
    }
    loss = train_and_save(base, tmp_path / "result", plans[strategy], decoder, three_steps()[:2], UNSEEN)
    assert loss_of(logits(stock(tmp_path / "result"))) == pytest.approx(loss, abs=1e-9)
    assert abs(loss_of(logits(stock(base))) - loss) > 1e-3
    names = changed(base, tmp_path / "result")
    tables = {f"{name}.weight" for name in (decoder.names.embedding, decoder.names.positions) if name}
    assert tables <= names
    assert not tied or "lm_head.weight" not in load_file(tmp_path / "result" / "model.safetensors")
    assert "lm_head.weight" not in names, "one of its own stays as it is"


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_under_a_head_of_sequences(tmp_path: Path, family: str) -> None:
    cfg = tiny_config(family)
    base, decoder = save_base(cfg, tmp_path / "base"), description(cfg)
    plan = tensor_plan([5, 3, 1], [13, 9, 4], [0, 0, 0])
    unseen = sequence_batch(cfg, (9, 7, 5), 77)
    data = {"task": "sequence-classification", "data": {"train": "unused", "labels": ["a", "b", "c"]}}
    loss = train_and_save(base, tmp_path / "result", plan, decoder, sequence_steps(cfg)[:2], unseen, **data)
    with torch.no_grad():
        found: Tensor = sequence_loss_of(logits_of(stock_classifier(tmp_path / "result"), unseen), unseen, "classes")
    assert float(found) / 3 == pytest.approx(loss, abs=1e-9)
    before, after = (load_file(each / "model.safetensors") for each in (base, tmp_path / "result"))
    for table in ("word_embeddings", "position_embeddings", "token_type_embeddings"):
        name = f"{family}.embeddings.{table}.weight"
        assert not torch.equal(before[name], after[name])


def test_a_head_that_the_base_has_twice_is_not_kept_as_it_was(tmp_path: Path) -> None:
    cfg = config("llama", tie_word_embeddings=True)
    base = save_tiny(cfg, tmp_path / "base")
    tensors = load_file(base / "model.safetensors")
    twice = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    save_file(twice, base / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((base / "config.json").read_text())["tie_word_embeddings"]
    loss = train_and_save(
        base, tmp_path / "result", tensor_plan(*WIDE["2"]), decoder_of(cfg), three_steps()[:2], UNSEEN
    )
    assert set(load_file(tmp_path / "result" / "model.safetensors")) == set(tensors)
    assert loss_of(logits(stock(tmp_path / "result"))) == pytest.approx(loss, abs=1e-9)
