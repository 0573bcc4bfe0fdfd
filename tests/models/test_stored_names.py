"""Names of checkpoints that were saved without their head, or long ago."""

import json
from pathlib import Path

import pytest

from potluck.models.prefixes import with_prefix


def named(directory: Path, model_type: str, *names: str) -> list[str]:
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    return list(with_prefix(dict.fromkeys(names, 0), directory))


@pytest.mark.parametrize(
    ("model_type", "prefix"), [("bert", "bert"), ("roberta", "roberta"), ("gpt2", "transformer"), ("llama", "model")]
)
def test_a_model_without_its_head_lacks_the_prefix(model_type: str, prefix: str, tmp_path: Path) -> None:
    assert named(tmp_path, model_type, "a.weight", "b.bias") == [f"{prefix}.a.weight", f"{prefix}.b.bias"]


def test_a_whole_model_keeps_its_names(tmp_path: Path) -> None:
    names = ["bert.embeddings.word_embeddings.weight", "cls.predictions.bias", "classifier.weight"]
    assert named(tmp_path, "bert", *names) == names


def test_heads_have_no_prefix(tmp_path: Path) -> None:
    names = ["embeddings.word_embeddings.weight", "pooler.dense.weight", "classifier.weight", "score.weight"]
    assert named(tmp_path, "bert", *names) == [f"bert.{names[0]}", f"bert.{names[1]}", *names[2:]]


def test_old_names_of_norms(tmp_path: Path) -> None:
    names = ["bert.embeddings.LayerNorm.gamma", "bert.encoder.layer.0.output.LayerNorm.beta"]
    assert named(tmp_path, "bert", *names) == [
        "bert.embeddings.LayerNorm.weight",
        "bert.encoder.layer.0.output.LayerNorm.bias",
    ]


def test_without_a_config_names_stay(tmp_path: Path) -> None:
    assert list(with_prefix({"a.weight": 0}, tmp_path)) == ["a.weight"]
