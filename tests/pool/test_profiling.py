"""Profiles in a process of their own."""

import signal
import sys
from pathlib import Path

import pytest

import potluck.pool.launch as launch
import potluck.pool.profiling as profiling
from potluck.errors import BadInput, DeviceLost
from potluck.job import Job
from potluck.pool.profiling import profile_job, profile_work
from word_model import save_rows, save_word_model


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_word_model(tmp_path / "model")
    save_rows(tmp_path / "data.jsonl")
    return Job.model_validate(
        {
            "model": str(tmp_path / "model"),
            "data": {"train": str(tmp_path / "data.jsonl")},
            "output": tmp_path / "out",
            "batch_size": 4,
        }
    )


def test_a_job_and_another_device_at_its_work(job: Job, tmp_path: Path) -> None:
    told: list[str] = []
    profile = profile_job(job, name="pi", threads=1, tell=told.append)
    assert (profile.device, profile.machine.threads) == ("pi", 1)
    assert (profile.work.rows, profile.work.config["num_attention_heads"]) == (2, 6)
    assert profile.work.dtype in ("fp32", "bf16")
    assert profile.attention_s.points[-1][0] == 4
    assert profile.runtime_bytes > 200 << 20
    assert any("pi" in line for line in told)
    assert not (tmp_path / "out").exists()

    for file in (tmp_path / "model").iterdir():
        file.unlink()
    config = {name: value for name, value in profile.work.config.items() if name != "attention_bias"}
    work = profile.work.model_copy(update={"config": config})  # as a machine has it whose transformers lacks a field
    like = profile_work(work, name="tau", threads=1)
    assert like.work == work
    assert like.device == "tau"
    assert like.attention_s.points != profile.attention_s.points, "who asks for a profile gets a new one"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"threads": 0}, "threads: .* not 0"),
        ({"threads": 10_000}, "threads: .* not 10000"),
        ({"pace": 0.0}, "pace: .* not 0"),
        ({"pace": float("nan")}, "pace: .* not nan"),
    ],
)
def test_arguments_that_cannot_be(job: Job, arguments: dict[str, float], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        profile_job(job, **arguments)  # type: ignore[arg-type]


def test_an_illegal_instruction_becomes_a_sentence(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    dies = (sys.executable, "-S", "-c", f"import os; os.kill(os.getpid(), {int(signal.SIGILL)})")

    def run_devices(specs: object, on_event: object) -> None:
        launch.run_devices(specs, on_event, command=dies)  # type: ignore[arg-type]

    monkeypatch.setattr(profiling, "run_devices", run_devices)
    with pytest.raises(DeviceLost, match=r"pi was killed by signal 4 \(SIGILL\).*lacks an instruction"):
        profile_job(job, name="pi", threads=1)
