"""MiniLM learns to tell spam, on two uneven devices as on one, and stock peft reads what it learnt."""

import json
from collections.abc import Sequence
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from potluck import Job, tune
from potluck.bench.mails import HAM, SPAM, Mail, divided_mails
from potluck.bench.minilm import minilm
from potluck.errors import BadInput
from potluck.pool.result import Result

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, BATCH_SIZE, HELD_OUT = 24, 16, 200


@pytest.fixture(scope="module")
def mails() -> tuple[list[Mail], list[Mail]]:
    try:
        minilm()
        return divided_mails(HELD_OUT)
    except BadInput as reason:
        pytest.skip(str(reason))


def write(file: Path, mails: Sequence[Mail]) -> str:
    file.write_text("".join(json.dumps(mail.labelled()) + "\n" for mail in mails))
    return str(file)


def learnt(directory: Path, mails: tuple[list[Mail], list[Mail]], **fields: object) -> tuple[Result, list[float]]:
    train, held_out = mails
    data = {
        "train": write(directory / "train.jsonl", train[: STEPS * BATCH_SIZE]),
        "eval": write(directory / "held-out.jsonl", held_out),
        "max_length": 64,
        "labels": [HAM, SPAM],
    }
    job = {
        "model": str(minilm()),
        "task": "sequence-classification",
        "data": data,
        "output": str(directory / f"out-{fields['devices']}".replace(":", "-")),
        "steps": STEPS,
        "batch_size": BATCH_SIZE,
        "learning_rate": 2e-3,
        "dtype": "fp32",
        "threads": 1,
    }
    result = tune(Job.model_validate(job | fields))
    lines = [json.loads(line) for line in (Path(result.adapter) / "metrics.jsonl").read_text().splitlines()]
    return result, [line["loss"] for line in lines if line["event"] == "step"]


def test_two_uneven_devices_tell_spam_as_one_does(tmp_path: Path, mails: tuple[list[Mail], list[Mail]]) -> None:
    alone, losses_alone = learnt(tmp_path, mails, devices="1", strategy="single")
    both, losses = learnt(tmp_path, mails, devices="3:2", strategy="tensor")
    assert losses == pytest.approx(losses_alone, rel=1e-3)
    assert alone.eval_after is not None
    assert both.eval_after is not None
    assert alone.eval_after.accuracy is not None
    assert both.eval_after.accuracy == pytest.approx(alone.eval_after.accuracy, abs=0.01)
    assert both.eval_after.accuracy > 0.8, "two of three mails are no spam"

    model = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=2, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, both.adapter).eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    held_out = mails[1]
    right = 0
    with torch.no_grad():
        for start in range(0, HELD_OUT, 50):
            part = held_out[start : start + 50]
            given = tokenizer(
                [mail.text for mail in part], truncation=True, max_length=64, padding=True, return_tensors="pt"
            )
            told = model(**given).logits.argmax(-1).tolist()
            right += sum((HAM, SPAM)[each] == mail.label for each, mail in zip(told, part, strict=True))
    assert right / HELD_OUT == pytest.approx(both.eval_after.accuracy, abs=1e-9)
