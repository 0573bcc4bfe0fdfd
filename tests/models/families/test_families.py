"""Configs that cannot be used are refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from potluck.errors import BadInput
from potluck.models.families import FAMILIES, decoder_of, read_config

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 8,
}


def directory(at: Path, content: object) -> Path:
    (at / "config.json").write_text(json.dumps(content))
    return at


def test_a_config_that_can_be_used(tmp_path: Path) -> None:
    assert decoder_of(read_config(directory(tmp_path, LLAMA))).num_heads == 4


def test_a_negative_padding_id_counts_from_the_end(tmp_path: Path) -> None:
    assert decoder_of(read_config(directory(tmp_path, LLAMA | {"pad_token_id": -1}))).padding == 7
    assert decoder_of(read_config(directory(tmp_path, LLAMA | {"pad_token_id": 0}))).padding == 0


@pytest.mark.parametrize("model_type", ["bloom", "of-nobody"])
def test_an_unknown_family_lists_the_known(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=f"'{model_type}' are not supported. Supported: {', '.join(sorted(FAMILIES))}"):
        decoder_of(read_config(directory(tmp_path, {"model_type": model_type})))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "config.json cannot be used"),
        ({}, "config.json cannot be used"),
        (LLAMA | {"hidden_size": "wide"}, "hidden_size"),
        (LLAMA | {"hidden_act": "no-such"}, "'no-such'"),
        (LLAMA | {"num_key_value_heads": 3}, "4 query heads"),
        (LLAMA | {"pad_token_id": 8}, "pad_token_id 8, .* vocab_size 8"),
        (LLAMA | {"pad_token_id": -9}, "pad_token_id -9, .* vocab_size 8"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "are quantised \\(gptq, "),
    ],
)
def test_a_config_with_a_fault(content: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        decoder_of(read_config(directory(tmp_path, content)))
    assert "\n" not in str(refused.value)
