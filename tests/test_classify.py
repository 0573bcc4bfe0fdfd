"""Results that classify, used: scored, asked, and refused in a sentence where they cannot be."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from class_model import CLASSES, ROWS, said_alone, save_classifier, save_labelled
from potluck.classify import has_classifier, in_order_of, score_classifier
from potluck.errors import BadInput
from potluck.job_sections import Data
from potluck.models.evaluate_classes import ClassScores
from potluck.models.families import read_config
from potluck.texts.rows import read_rows
from potluck.texts.task_rows import read_for
from potluck.use import encode_for, evaluate_result, generate, open_result
from said import potluck_json
from word_model import WORDS, save_rows, save_word_model


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in whatever is faster here."""
    monkeypatch.setattr("potluck.use.inference_dtype", lambda model_dir: torch.float32)


def ids_of(base: Path, *texts: str) -> list[int]:
    ids: list[int] = AutoTokenizer.from_pretrained(base)(*texts)["input_ids"]
    return ids


@pytest.mark.parametrize("others", [False, True])
def test_scores_of_a_result(others: bool, tmp_path: Path) -> None:
    base, out, model = save_classifier(tmp_path, CLASSES)
    named = ("sentence", "class") if others else ("text", "label")  # a file may call its columns otherwise
    held_out = save_labelled(tmp_path / "held.jsonl", *named)
    before, after = evaluate_result(out, [str(held_out)])
    assert before is None
    assert isinstance(after, ClassScores)
    logits = torch.stack([said_alone(model, ids_of(base, text)) for text, _ in ROWS])
    labels = torch.tensor([CLASSES.index(name) for _, name in ROWS])
    assert after.examples == 5
    assert after.accuracy == pytest.approx((logits.argmax(-1) == labels).float().mean().item())
    assert after.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-4)


def test_classes_by_name(tmp_path: Path) -> None:
    base, out, model = save_classifier(tmp_path, CLASSES)
    texts = [text for text, _ in ROWS]
    expected = [CLASSES[int(said_alone(model, ids_of(base, text)).argmax())] for text in texts]
    assert generate(out, texts) == expected
    with pytest.raises(BadInput, match=r"trained on single texts \('text'\): leave out the second"):
        generate(out, ["door"], pairs=["door"])
    with pytest.raises(ValueError, match="2 prompts and 1 second texts"):
        generate(out, ["door", "light"], pairs=["door"])


def test_pairs_need_both_texts(tmp_path: Path) -> None:
    base, out, model = save_classifier(tmp_path, CLASSES, pairs=True)
    expected = CLASSES[int(said_alone(model, ids_of(base, "light on", "door open")).argmax())]
    assert generate(out, ["light on"], pairs=["door open"]) == [expected]
    with pytest.raises(BadInput, match=r"trained on pairs of texts \('sentence1', 'sentence2'\): give the second"):
        generate(out, ["light on"])
    file = tmp_path / "one.jsonl"
    file.write_text(json.dumps({"sentence1": "light", "label": "lamp"}) + "\n")
    with pytest.raises(BadInput, match="'sentence1' is the first text of a pair"):
        evaluate_result(out, [str(file)])


def test_values(tmp_path: Path) -> None:
    base, out, model = save_classifier(tmp_path, [])
    (said,) = generate(out, ["door open"])
    assert float(said) == pytest.approx(said_alone(model, ids_of(base, "door open")).item(), rel=1e-4)
    file = tmp_path / "values.csv"
    file.write_text("text,score\n" + "".join(f"{text},{i / 2}\n" for i, (text, _) in enumerate(ROWS)))
    _, after = evaluate_result(out, [str(file)])
    assert isinstance(after, ClassScores)
    assert after.accuracy is None
    assert after.pearson is not None
    assert after.spearman is not None


def test_labels_that_training_did_not_know(tmp_path: Path) -> None:
    _, out, _ = save_classifier(tmp_path, CLASSES)
    file = tmp_path / "new.csv"
    file.write_text("text,label\ndoor,house\nlight,garden\n")
    with pytest.raises(BadInput, match=r"new\.csv:3: the label of this row is none of the 3 classes(.|\n)*'garden'"):
        evaluate_result(out, [str(file)])


def test_a_head_that_was_there_before_is_scored(tmp_path: Path) -> None:
    base, out, _ = save_classifier(tmp_path, CLASSES)
    assert not has_classifier(base)
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model.config.id2label = dict(enumerate(["sound", "house", "lamp"]))
    model.save_pretrained(base)
    assert has_classifier(base)
    before, after = evaluate_result(out, [str(save_labelled(tmp_path / "held.jsonl"))])
    assert isinstance(before, ClassScores)
    assert before != after
    config = read_config(base)
    assert in_order_of(config, Data(train=["a"], labels=CLASSES)).labels == ["sound", "house", "lamp"]
    assert in_order_of(config, Data(train=["a"], labels=["a", "b", "c"])).labels == ["a", "b", "c"]


def test_a_plain_checkpoint_tells_its_own_classes(tmp_path: Path) -> None:
    base = save_word_model(tmp_path / "base")
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=3)
    model.config.id2label = dict(enumerate(CLASSES))
    model.save_pretrained(tmp_path / "plain")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "plain")
    trained = open_result(tmp_path / "plain")
    assert (trained.task, trained.data.labels) == ("sequence-classification", CLASSES)
    (said,) = generate(tmp_path / "plain", ["door open"])
    assert said == CLASSES[int(said_alone(model.eval(), ids_of(base, "door open")).argmax())]
    assert open_result(base).task == "causal-lm"


def test_texts_are_cut_to_the_models_positions(tmp_path: Path) -> None:
    base = save_word_model(tmp_path / "base", max_position_embeddings=8)
    file = tmp_path / "long.csv"
    file.write_text(f"text,label\n{'door ' * 50},a\n")
    rows = read_for("sequence-classification", [str(file)], Data(train=["a"]))
    (example,) = encode_for(base, rows, Data(train=["a"], labels=["a", "b"]))
    assert (len(example.ids), example.reads_at) == (8, 7)


def test_answers_are_still_answered(tmp_path: Path) -> None:
    base = save_word_model(tmp_path / "base")
    file = save_rows(tmp_path / "data.jsonl")
    examples = encode_for(base, read_rows([str(file)], "auto"), Data(train=["a"], format="prompt"))
    assert all(example.label is None and example.answer for example in examples)
    with pytest.raises(BadInput, match="goes on from one text"):
        generate(base, ["light"], pairs=["door"])


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = partial(potluck_json, monkeypatch, capsys)
    base, out, model = save_classifier(tmp_path, CLASSES, pairs=True)
    expected = CLASSES[int(said_alone(model, ids_of(base, "light", "door open")).argmax())]
    said = run("generate", str(out), "light", "--pair", "door open")
    assert said == {"prompt": "light", "answer": expected}
    file = tmp_path / "pairs.csv"
    file.write_text("premise,hypothesis,label\n" + "".join(f"{text},{WORDS[1]},{name}\n" for text, name in ROWS))
    scores = run("eval", str(out), str(file))
    assert scores["before"] is None
    assert scores["after"].keys() == {"loss", "accuracy", "f1", "matthews", "pearson", "spearman", "examples"}
    assert scores["after"]["examples"] == 5


def test_scoring_says_how_far_it_is(tmp_path: Path) -> None:
    base, out, _ = save_classifier(tmp_path, CLASSES)
    told: list[tuple[int, int]] = []
    data = open_result(out).data
    rows = read_for("sequence-classification", [str(save_labelled(tmp_path / "held.jsonl"))], data)
    examples = encode_for(base, rows, data)
    score_classifier(base, out, examples, torch.float32, data, progress=lambda *now: told.append(now))
    assert told == [(5, 5)]
