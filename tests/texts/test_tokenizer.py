"""Loading the tokenizer beside a model."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from potluck.errors import BadInput
from potluck.texts.tokenizer import load_tokenizer


def test_a_saved_tokenizer_loads_with_its_template(
    tmp_path: Path, tokenizers: dict[str, PreTrainedTokenizerBase]
) -> None:
    saved = tokenizers["llama3"]
    saved.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded("turn on the light")["input_ids"] == saved("turn on the light")["input_ids"]
    assert loaded.chat_template == saved.chat_template
    assert loaded.eos_token == "<|eot_id|>"


def test_a_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model directory"):
        load_tokenizer(tmp_path / "none")


def test_a_directory_without_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match=r"tokenizer\.json that cannot be loaded"):
        load_tokenizer(tmp_path)


def test_code_of_the_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}})
    )
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "own.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('ran').touch()\nclass Own: pass"
    )
    with pytest.raises(BadInput):
        load_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()
