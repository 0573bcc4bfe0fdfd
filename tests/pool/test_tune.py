"""Whole runs on a tiny model: real processes, real files, stock peft as the judge."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from potluck import BadInput, DeviceLost, Job, Listener, load_job, tune
from potluck.job import parse_job
from potluck.pool.launch import Event
from potluck.texts.rows import read_rows
from potluck.use import encode_for, generate, merge_result, score
from word_model import ROWS, save_rows, save_word_model


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def job(model_dir: Path, tmp_path: Path) -> Job:
    data = save_rows(tmp_path / "data.jsonl")
    return Job.model_validate(
        {
            "model": str(model_dir),
            "data": {"train": str(data), "eval": str(data)},
            "output": tmp_path / "out",
            "devices": "2:1",
            "steps": 25,
            "batch_size": 4,
            "learning_rate": 0.02,
            "dtype": "fp32",
            "threads": 1,
        }
    )


class Recorder(Listener):
    def __init__(self) -> None:
        self.events: list[Event] = []

    def event(self, event: Event) -> None:
        self.events.append(event)


def test_two_uneven_devices_learn_and_the_adapter_is_stock(job: Job, model_dir: Path) -> None:
    recorder = Recorder()
    result = tune(job, listener=recorder)

    assert result.strategy == "tensor"
    assert [(device.name, device.heads) for device in result.devices] == [("device-0", 4), ("device-1", 2)]
    assert result.loss_last < 0.5 < result.loss_first
    assert result.eval_before is not None
    assert result.eval_after is not None
    assert result.eval_after.accuracy == 1.0
    assert all(device.peak_rss_mib > 100 and device.compute_s > 0 for device in result.devices)
    assert sum(event["event"] == "finished" for event in recorder.events) == 2

    assert sorted(file.name for file in job.output.parent.iterdir()) == ["data.jsonl", "out"]
    lines = [json.loads(line) for line in (job.output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, 26))
    assert lines[-1]["after"]["accuracy"] == 1.0

    # The scores are those of what lies on the disk, not of what was in the devices' memory.
    held_out = encode_for(model_dir, read_rows(job.data.eval, "auto"), job.data)
    assert score(model_dir, job.output, held_out, torch.float32).loss == pytest.approx(result.eval_after.loss, abs=1e-5)
    assert score(model_dir, None, held_out, torch.float32).loss == pytest.approx(result.eval_before.loss, abs=1e-5)
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), job.output)
    assert any("lora_A" in name for name, _ in stock.named_parameters())
    assert generate(job.output, [row["prompt"] for row in ROWS], max_new_tokens=3) == ["A", "B", "C", "D"]

    again = load_job(job.output / "job.yaml")
    assert again.data.format == "prompt"
    assert Path(again.model).is_absolute()
    assert again.steps == 25


@pytest.mark.parametrize(
    "fields",
    [
        {"train": "ia3", "ia3": {"targets": ["all-linear"]}, "learning_rate": 0.1, "steps": 80},
        {"lora": {"use_dora": True, "use_rslora": True, "targets": ["q_proj", "v_proj", "gate_proj", "up_proj"]}},
        {"lora": {"use_dora": True}, "devices": "1"},
    ],
    ids=["ia3", "dora of columns", "dora alone"],
)
def test_other_adapters_learn_and_are_stock(job: Job, model_dir: Path, fields: dict[str, Any]) -> None:
    changed = Job.model_validate(job.model_dump() | fields)
    result = tune(changed)
    assert result.loss_last < 0.5 < result.loss_first
    assert result.eval_after is not None
    assert result.eval_after.accuracy == 1.0
    stock = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_dir), job.output)
    part = "ia3_l" if changed.train == "ia3" else "lora_magnitude_vector"
    assert any(part in name for name, _ in stock.named_parameters())
    merge_result(job.output, job.output.with_name("merged"))
    for directory in (job.output, job.output.with_name("merged")):
        assert generate(directory, [row["prompt"] for row in ROWS], max_new_tokens=3) == ["A", "B", "C", "D"]
    assert load_job(job.output / "job.yaml").adapter == changed.adapter


def test_full_fine_tuning_leaves_a_plain_checkpoint(job: Job) -> None:
    result = tune(job.model_copy(update={"train": "full", "devices": "1", "steps": 15, "learning_rate": 0.01}))
    assert result.strategy == "single"
    assert result.eval_after is not None
    assert result.eval_after.accuracy == 1.0
    AutoModelForCausalLM.from_pretrained(job.output)
    assert generate(job.output, ["music on ->"], max_new_tokens=3) == ["C"]


def test_embeddings_that_two_devices_trained_are_in_the_checkpoint(job: Job, model_dir: Path) -> None:
    trains = {"train": "full", "train_embeddings": True, "data_stays": False, "steps": 15, "learning_rate": 0.01}
    result = tune(job.model_copy(update=trains))
    assert (result.strategy, len(result.devices)) == ("tensor", 2)
    assert result.eval_after is not None
    assert result.eval_after.accuracy == 1.0
    before, after = (AutoModelForCausalLM.from_pretrained(each) for each in (model_dir, job.output))
    assert not torch.equal(before.get_input_embeddings().weight, after.get_input_embeddings().weight)
    assert after.get_output_embeddings().weight is after.get_input_embeddings().weight
    held_out = encode_for(model_dir, read_rows(job.data.eval, "auto"), job.data)
    assert score(job.output, None, held_out, torch.float32).loss == pytest.approx(result.eval_after.loss, abs=1e-5)
    assert load_job(job.output / "job.yaml").train_embeddings


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"train": "full", "train_embeddings": True}, "strategy: 'tensor' is not possible: .*is the LM head too"),
        ({"lora": {"targets": ["c_attn"]}}, "c_attn.*matches no linear.*q_proj"),
        ({"train": "ia3", "ia3": {"targets": ["c_attn"]}}, r"ia3\.targets: 'c_attn'.*matches no linear.*q_proj"),
        ({"lora": {"use_dora": True}}, "'tensor' is not possible: lora.use_dora norms whole rows"),
        ({"devices": "2:1", "shares": {"heads": [5, 2]}}, "shares.heads"),
        ({"data": {"train": ["nowhere.jsonl"]}}, "nowhere.jsonl"),
        ({"model": "no/such/model"}, "no/such/model"),
    ],
)
def test_bad_input_is_refused_before_any_device_starts(job: Job, change: dict[str, Any], sentence: str) -> None:
    recorder = Recorder()
    with pytest.raises(BadInput, match=sentence):
        tune(parse_job(job.model_dump() | change), listener=recorder)
    assert recorder.events == []
    assert not job.output.exists()


def test_what_only_a_device_finds_out_is_bad_input_too(job: Job, tmp_path: Path) -> None:
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"prompt": "light " * 50, "completion": " A"}) + "\n")
    data = {"train": [str(long)], "max_length": 8}
    with pytest.raises(BadInput, match="max_length 8"):
        tune(parse_job(job.model_dump() | {"data": data}))
    assert not job.output.exists()


def test_a_device_that_is_killed_ends_the_run_and_leaves_nothing(job: Job) -> None:
    class Killer(Listener):
        def event(self, event: Event) -> None:
            if event["event"] == "step" and event["step"] == 2:
                os.kill(device_pids()[1], signal.SIGKILL)

    with pytest.raises(DeviceLost, match=r"device-\d was killed by signal 9"):
        tune(job.model_copy(update={"steps": 10_000}), listener=Killer())
    assert device_pids() == []
    assert [file.name for file in job.output.parent.iterdir()] == ["data.jsonl"]


def test_an_interrupt_leaves_what_stood_there_before(job: Job) -> None:
    job.output.mkdir()
    (job.output / "kept.txt").write_text("precious")

    class Interrupter(Listener):
        def event(self, event: Event) -> None:
            if event["event"] == "step" and event["step"] == 2:
                threading.Timer(0.0, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        tune(job.model_copy(update={"steps": 10_000, "overwrite": True}), listener=Interrupter())
    assert device_pids() == []
    assert sorted(file.name for file in job.output.parent.iterdir()) == ["data.jsonl", "out"]
    assert (job.output / "kept.txt").read_text() == "precious"


def device_pids() -> list[int]:
    children = Path(f"/proc/self/task/{threading.main_thread().native_id}/children").read_text().split()
    return [pid for pid in map(int, children) if b"potluck.pool.device" in Path(f"/proc/{pid}/cmdline").read_bytes()]
