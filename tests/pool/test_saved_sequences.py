"""What a pool saves of a head of whole sequences: stock peft and transformers load it strictly and compute the same."""

import json
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from pool.alike import pipeline_plan, tensor_plan
from pool.plain import exact_norms
from pool.sequences import (
    CLASSES,
    HEADS,
    description,
    logits_of,
    loss_of,
    save_base,
    sequence_batch,
    sequence_steps,
    tiny_config,
)
from potluck.chain.classifier import Kind
from potluck.chain.comm import Comm
from potluck.errors import BadInput
from potluck.job import JOB_FILE, Job, dump_job
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import with_frozen
from potluck.models.inference import load_classifier
from potluck.models.merge import merge
from potluck.pool.plan import Plan
from potluck.pool.step import OWNER, Stepper
from potluck.pool.strategies.build import part_for, strategy_for
from potluck.pool.trainer import save, settings_of
from potluck.pool.turns import Turn
from worlds import run_world

LABELS = ["bird", "cat", "dog"]


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_norms():
        yield


@dataclass
class Saved:
    base: Path
    result: Path
    loss: float
    """Of the pool's own model after training, on an unseen batch."""
    trained: set[str]


def unseen(cfg: PretrainedConfig, kind: Kind) -> Any:
    return sequence_batch(cfg, (9, 7, 5), 77, kind)


def train_and_save(
    tmp_path: Path,
    family: str,
    plan: Plan,
    *,
    kind: Kind = "classes",
    without: tuple[str, ...] = HEADS,
    **fields: Any,
) -> Saved:
    cfg = tiny_config(family, kind)
    base, result = save_base(cfg, tmp_path / "base", without=without), tmp_path / "result"
    config = json.loads((base / "config.json").read_text())
    for of_head in ("id2label", "label2id", "problem_type", "architectures", "num_labels"):
        config.pop(of_head, None)
    (base / "config.json").write_text(json.dumps(config))
    result.mkdir()
    job = Job.model_validate(
        {
            "model": str(base),
            "task": "sequence-classification" if kind == "classes" else "sequence-regression",
            "data": {"train": "unused", "labels": LABELS if kind == "classes" else []},
            "output": tmp_path / "out",
            "learning_rate": 0.05,
            **fields,
        }
    )

    def body(comm: Comm) -> tuple[float, set[str]]:
        with Checkpoint.open(base) as checkpoint:
            decoder = with_frozen(description(cfg, kind), job.frozen_blocks)
            part = part_for(
                plan, comm.rank, checkpoint, decoder, compute=torch.float64, adapter=job.adapter, seed=job.seed
            )
            settings = settings_of(job, 2)
            stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
            for batches in sequence_steps(cfg, kind)[:2]:
                stepper.step([Turn(OWNER, batches if comm.rank == OWNER else None)])
            save(job, stepper.strategy.whole(), comm.rank, checkpoint, decoder, base, result)
            own = [unseen(cfg, kind)] if comm.rank == OWNER else None
            return stepper.accumulate([Turn(OWNER, own)]).loss, {t.name for t in part.chain.trained}

    found = run_world(len(plan.devices), body, wire=torch.float64)
    (result / JOB_FILE).write_text(dump_job(job))
    return Saved(base, result, found[0][0], set().union(*(names for _, names in found)))


def stock(directory: Path, *, new_head: bool = False, **told: Any) -> Any:
    """The stock model; only a head may be missing, and nothing may be left over."""
    model, info = AutoModelForSequenceClassification.from_pretrained(
        directory, dtype=torch.float64, output_loading_info=True, **told
    )
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert bool(info["missing_keys"]) == new_head
    return model.eval()


def strictly_loaded(saved: Saved, size: int) -> Any:
    def base() -> Any:
        return stock(saved.base, new_head=True, num_labels=size)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
        adapted = get_peft_model(base(), PeftConfig.from_pretrained(saved.result))
        stored = load_peft_weights(str(saved.result), device="cpu")
        outcome = set_peft_model_state_dict(adapted, stored)
        assert outcome.unexpected_keys == []
        wanted = {name for name in adapted.state_dict() if "lora" in name or "ia3" in name or "modules_to_save" in name}
        assert len(wanted) == len(stored), "each trained tensor has its place, and no other is left"
        return PeftModel.from_pretrained(base(), saved.result).eval()


def loss_on_unseen(model: Any, saved: Saved, family: str, kind: Kind) -> tuple[float, Tensor]:
    batch = unseen(tiny_config(family, kind), kind)
    with torch.no_grad():
        logits_BC = logits_of(model, batch)
        return float(loss_of(logits_BC, batch, kind) / len(batch.layout.lengths)), logits_BC


PLANS = {
    "single": tensor_plan([9], [26], [0]),
    "tensor": tensor_plan([5, 3, 1], [13, 9, 4], [0, 0, 0]),
    "pipeline": pipeline_plan(description(tiny_config("llama")), [(1, 2), (0, 2)]),
}


@pytest.mark.parametrize("plan", ["tensor", "pipeline"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "roberta"])
def test_an_adapter_and_its_head(tmp_path: Path, family: str, plan: str) -> None:
    saved = train_and_save(tmp_path, family, PLANS[plan], lora={"rank": 4, "alpha": 6})
    loss, logits_BC = loss_on_unseen(strictly_loaded(saved, CLASSES), saved, family, "classes")
    assert logits_BC.shape == (3, CLASSES)
    assert abs(loss - saved.loss) < 1e-9
    config = json.loads((saved.result / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS"
    assert config["modules_to_save"] == ["classifier" if family in ("bert", "roberta") else "score"]

    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    merged = stock(tmp_path / "merged")
    assert merged.config.id2label == dict(enumerate(LABELS))
    assert (loss_on_unseen(merged, saved, family, "classes")[1] - logits_BC).abs().max() < 1e-9


@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        ("tensor", {"train": "ia3"}),
        ("pipeline", {"train": "ia3", "ia3": {"targets": ["all-linear"]}}),
        ("pipeline", {"lora": {"rank": 4, "use_dora": True}}),
        ("tensor", {"lora": {"rank": 4, "use_rslora": True}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "roberta"])
def test_other_adapters_and_their_head(tmp_path: Path, family: str, plan: str, fields: dict[str, Any]) -> None:
    saved = train_and_save(tmp_path, family, PLANS[plan], **fields)
    loss, logits_BC = loss_on_unseen(strictly_loaded(saved, CLASSES), saved, family, "classes")
    assert abs(loss - saved.loss) < 1e-9
    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    merged = stock(tmp_path / "merged")
    assert (loss_on_unseen(merged, saved, family, "classes")[1] - logits_BC).abs().max() < 1e-9


@pytest.mark.parametrize("plan", ["single", "tensor", "pipeline"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "roberta"])
def test_a_plain_checkpoint_after_full_fine_tuning(tmp_path: Path, family: str, plan: str) -> None:
    saved = train_and_save(tmp_path, family, PLANS[plan], train="full")
    model = stock(saved.result)
    assert abs(loss_on_unseen(model, saved, family, "classes")[0] - saved.loss) < 1e-9
    assert model.config.id2label == dict(enumerate(LABELS))
    assert model.config.label2id == {name: i for i, name in enumerate(LABELS)}
    assert model.config.num_labels == CLASSES
    assert model.config.problem_type == "single_label_classification"
    assert model.config.architectures == [type(model).__name__]


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "roberta"])
def test_a_value(tmp_path: Path, family: str, train: str) -> None:
    saved = train_and_save(tmp_path, family, PLANS["tensor"], kind="value", train=train)
    model = stock(saved.result) if train == "full" else strictly_loaded(saved, 1)
    loss, logits_B1 = loss_on_unseen(model, saved, family, "value")
    assert logits_B1.shape == (3, 1)
    assert abs(loss - saved.loss) < 1e-9
    if train == "full":
        assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    else:
        merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
        assert stock(tmp_path / "merged").config.problem_type == "regression"


@pytest.mark.parametrize("family", ["llama", "bert", "roberta"])
def test_a_head_alone(tmp_path: Path, family: str) -> None:
    saved = train_and_save(tmp_path, family, PLANS["pipeline"], frozen_blocks=2)
    assert not any("lora" in name for name in saved.trained)
    loss, logits_BC = loss_on_unseen(strictly_loaded(saved, CLASSES), saved, family, "classes")
    assert abs(loss - saved.loss) < 1e-9
    ours = load_classifier(saved.base, saved.result, torch.float64, classes=CLASSES)
    assert (loss_on_unseen(ours, saved, family, "classes")[1] - logits_BC).abs().max() < 1e-9
    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    assert (loss_on_unseen(stock(tmp_path / "merged"), saved, family, "classes")[1] - logits_BC).abs().max() < 1e-9


def test_a_pooler_that_the_checkpoint_lacks_is_trained_and_saved(tmp_path: Path) -> None:
    without = (*HEADS, "bert.pooler.")
    saved = train_and_save(tmp_path, "bert", PLANS["tensor"], without=without)
    assert "bert.pooler.dense.weight" in saved.trained
    assert abs(loss_on_unseen(strictly_loaded(saved, CLASSES), saved, "bert", "classes")[0] - saved.loss) < 1e-9


def test_dense_is_not_the_poolers(tmp_path: Path) -> None:
    saved = train_and_save(tmp_path, "bert", PLANS["single"], lora={"rank": 2, "targets": ["dense", "query"]})
    config = json.loads((saved.result / "adapter_config.json").read_text())
    assert config["target_modules"] == ["attention.output.dense", "intermediate.dense", "output.dense", "query"]
    assert abs(loss_on_unseen(strictly_loaded(saved, CLASSES), saved, "bert", "classes")[0] - saved.loss) < 1e-9


def test_an_adapter_that_lost_its_job_is_merged_with_numbered_classes(tmp_path: Path) -> None:
    saved = train_and_save(tmp_path, "bert", PLANS["single"])
    (saved.result / JOB_FILE).unlink()
    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    assert stock(tmp_path / "merged").config.id2label == {i: f"LABEL_{i}" for i in range(CLASSES)}


def test_a_head_for_other_classes_is_refused(tmp_path: Path) -> None:
    other = tiny_config("bert")
    other.num_labels = 5
    shutil.rmtree(tmp_path / "base", ignore_errors=True)
    save_base(other, tmp_path / "other", without=())
    with (
        Checkpoint.open(tmp_path / "other") as checkpoint,
        pytest.raises(BadInput, match=r"classifier.weight has shape"),
    ):
        part_for(
            PLANS["single"],
            0,
            checkpoint,
            description(tiny_config("bert")),
            compute=torch.float32,
            adapter=None,
            seed=0,
        )
