"""The commands one after the other, as a person types them, on a tiny model and with real devices."""

import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from said import potluck_json
from word_model import ANSWERS, save_rows, save_word_model


@pytest.fixture(autouse=True)
def _sigterm_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_tune_generate_eval_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = partial(potluck_json, monkeypatch, capsys)
    monkeypatch.chdir(tmp_path)
    save_word_model(tmp_path / "model")
    save_rows(tmp_path / "data.jsonl")
    (tmp_path / "job.yaml").write_text(
        "model: model\ndata: {train: data.jsonl, eval: data.jsonl}\noutput: elsewhere\n"
        "steps: 25\nbatch_size: 4\nlearning_rate: 0.02\ndtype: fp32\nthreads: 1\n"
    )
    result = run("tune", "job.yaml", "--output", "out", "--devices", "2:1")
    assert result["strategy"] == "tensor"
    assert result["eval_after"]["accuracy"] == 1.0
    assert [device["heads"] for device in result["devices"]] == [4, 2]
    assert sum(device["columns"] for device in result["devices"]) == 64
    assert not (tmp_path / "elsewhere").exists()

    monkeypatch.chdir(tmp_path / "out")  # a result can be used from anywhere
    for asked, answer in ANSWERS.items():
        said = run("generate", str(tmp_path / "out"), f"{asked} ->", "--max-new-tokens", "3")
        assert said == {"prompt": f"{asked} ->", "answer": answer}

    scores = run("eval", str(tmp_path / "out"), str(tmp_path / "data.jsonl"))
    assert scores["after"]["loss"] == pytest.approx(result["eval_after"]["loss"], abs=0.05)
    assert scores["before"]["loss"] == pytest.approx(result["eval_before"]["loss"], abs=0.05)
    assert scores["after"]["accuracy"] == 1.0
    assert (scores["after"]["examples"], scores["after"]["target_tokens"]) == (4, 8)

    merged = run("merge", str(tmp_path / "out"), str(tmp_path / "merged"))
    assert merged == {"model": str(tmp_path / "merged")}
    AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (tmp_path / "merged" / "job.yaml").read_bytes() == (tmp_path / "out" / "job.yaml").read_bytes()
    scores = run("eval", str(tmp_path / "merged"), str(tmp_path / "data.jsonl"))
    assert scores["before"] is None
    assert scores["after"]["accuracy"] == 1.0
