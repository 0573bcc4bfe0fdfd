"""Whole runs of classification and regression on a tiny model: real processes, real files, stock peft as the judge."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig, BertModel

from bert_tokenizer import bert_tokenizer
from class_model import CLASSES, ROWS, save_labelled
from potluck import BadInput, Job, Listener, evaluate_result, generate, load_job, tune
from word_model import save_word_model


class Recorder(Listener):
    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, text: str) -> None:
        self.told.append(text)


def job_of(directory: Path, examples: Path, model: Path | None = None, **fields: Any) -> Job:
    model = model or save_word_model(directory / "model")
    return Job.model_validate(
        {
            "model": str(model),
            "task": "sequence-classification",
            "data": {"train": str(examples), "eval": str(examples)},
            "output": directory / "out",
            "devices": "2:1",
            "steps": 30,
            "batch_size": 5,
            "learning_rate": 0.02,
            "dtype": "fp32",
            "threads": 1,
        }
        | fields
    )


def test_two_uneven_devices_learn_classes_and_the_adapter_is_stock(tmp_path: Path) -> None:
    job, recorder = job_of(tmp_path, save_labelled(tmp_path / "data.jsonl")), Recorder()
    result = tune(job, listener=recorder)
    assert result.strategy == "tensor"
    assert result.loss_last < 0.3 < result.loss_first
    assert result.eval_before is None
    assert any("no head for sequence-classification yet" in text for text in recorder.told)
    assert result.eval_after is not None
    assert (result.eval_after.accuracy, result.eval_after.f1, result.eval_after.matthews) == (1.0, 1.0, 1.0)
    line = json.loads((job.output / "metrics.jsonl").read_text().splitlines()[-1])
    assert (line["before"], line["after"]["accuracy"]) == (None, 1.0)

    base = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=3)
    stock = PeftModel.from_pretrained(base, job.output).eval()
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    with torch.inference_mode():
        said = [int(stock(torch.tensor([tokenizer(text)["input_ids"]])).logits.argmax()) for text, _ in ROWS]
    assert [CLASSES[index] for index in said] == [name for _, name in ROWS]
    assert generate(job.output, [text for text, _ in ROWS]) == [name for _, name in ROWS]
    again = load_job(job.output / "job.yaml")
    assert (again.task, again.data.labels, again.data.text) == ("sequence-classification", CLASSES, "text")
    _, after = evaluate_result(job.output, job.data.eval)
    assert after.accuracy == 1.0


@pytest.mark.parametrize("strategy", ["pipeline", "data"])
def test_other_strategies_learn_them_too(strategy: str, tmp_path: Path) -> None:
    fields = {"strategy": strategy, "devices": "2", "data_stays": False, "micro_batch_size": 2}
    result = tune(job_of(tmp_path, save_labelled(tmp_path / "data.jsonl"), **fields))
    assert result.strategy == strategy
    assert result.eval_after is not None
    assert result.eval_after.accuracy == 1.0


def test_full_fine_tuning_leaves_a_plain_classifier(tmp_path: Path) -> None:
    job = job_of(tmp_path, save_labelled(tmp_path / "data.jsonl"), train="full", devices="1", learning_rate=0.01)
    result = tune(job)
    assert result.eval_after is not None
    assert result.eval_after.accuracy == 1.0
    config = AutoModelForSequenceClassification.from_pretrained(job.output).config
    assert config.id2label == dict(enumerate(CLASSES))
    assert generate(job.output, ["music on"]) == ["sound"]


def test_an_encoder_learns_pairs(tmp_path: Path) -> None:
    words = ["light", "music", "door", "on", "off"]
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = BertConfig(vocab_size=9, max_position_embeddings=12, initializer_range=0.3, **shape)
    BertModel(config).save_pretrained(tmp_path / "bert")
    bert_tokenizer(words).save_pretrained(tmp_path / "bert")
    data = tmp_path / "pairs.csv"
    lines = [f"{a},{b},{'same' if a == b else 'other'}" for a in ("light", "music", "door") for b in ("light", "door")]
    data.write_text("\n".join(["sentence1,sentence2,label", *lines]))
    job = job_of(tmp_path, data, tmp_path / "bert", steps=60, batch_size=6)
    result = tune(job)
    assert result.loss_last < 0.4 < result.loss_first
    assert result.eval_after is not None
    assert result.eval_after.accuracy == 1.0
    assert (load_job(job.output / "job.yaml").data.text_pair) == "sentence2"
    assert generate(job.output, ["door", "light"], pairs=["door", "door"]) == ["same", "other"]
    base = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=2)
    stock = PeftModel.from_pretrained(base, job.output).eval()
    encoded = AutoTokenizer.from_pretrained(job.model)(["music", "door"], ["light", "door"], return_tensors="pt")
    with torch.inference_mode():
        said = stock(input_ids=encoded["input_ids"], token_type_ids=encoded["token_type_ids"]).logits.argmax(-1)
    assert said.tolist() == [0, 1]


def test_values_are_learnt(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("text,score\nlight on,1.5\nlight off,-0.5\nmusic on,0.25\ndoor open,0\n")
    result = tune(job_of(tmp_path, data, task="sequence-regression", steps=60))
    assert result.eval_after is not None
    assert result.eval_after.loss < 0.05
    assert result.eval_after.pearson == pytest.approx(1.0, abs=0.05)
    assert float(generate(result.adapter, ["light on"])[0]) == pytest.approx(1.5, abs=0.5)


def test_a_head_alone_is_learnt_by_stages_of_which_one_trains_nothing(tmp_path: Path) -> None:
    fields = {"strategy": "pipeline", "devices": "2", "data_stays": False, "micro_batch_size": 2}
    job = job_of(tmp_path, save_labelled(tmp_path / "data.jsonl"), frozen_blocks=2, optimizer="lion", **fields)
    result = tune(job)
    assert result.loss_last < 0.8 * result.loss_first
    base = AutoModelForSequenceClassification.from_pretrained(job.model, num_labels=3)
    stock = PeftModel.from_pretrained(base, job.output).eval()
    trained = {name for name, _ in stock.named_parameters() if "lora" in name or "modules_to_save" in name}
    assert {name.split(".")[-1] for name in trained} == {"weight"}
    assert len(trained) == 1
    tokenizer = AutoTokenizer.from_pretrained(job.model)
    with torch.inference_mode():
        said = [int(stock(torch.tensor([tokenizer(text)["input_ids"]])).logits.argmax()) for text, _ in ROWS]
    assert generate(job.output, [text for text, _ in ROWS]) == [CLASSES[index] for index in said]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "text,label\nlight on,0.5\nmusic,1.5\n",
            r"'label' is not a whole number or a name, but a number written with a frac",
        ),
        ("text,kind\nlight on,a\nmusic,b\n", "no column of labels is found; keys found: text, kind"),
        ("premise,label\nlight on,a\nmusic,b\n", "'premise' is the first text of a pair, and there is no 'hypothesis'"),
        ("premise,hypothesis,label\nlight on,on,a\nmusic,,b\n", "'hypothesis' is empty beside 'premise'"),
    ],
)
def test_rows_that_cannot_be_classified_are_refused_first(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(content)
    job = job_of(tmp_path, tmp_path / "data.csv")
    with pytest.raises(BadInput, match=sentence):
        tune(job)
    assert not job.output.exists()


def test_labels_that_training_does_not_have_are_refused_first(tmp_path: Path) -> None:
    held_out = tmp_path / "held.csv"
    held_out.write_text("text,label\nlight,garden\n")
    data = {"train": str(save_labelled(tmp_path / "data.jsonl")), "eval": str(held_out)}
    job = job_of(tmp_path, tmp_path / "data.jsonl", data=data)
    with pytest.raises(BadInput, match=r"held\.csv:2: the label of this row is none of the 3 classes"):
        tune(job)
    assert not job.output.exists()
