import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig, PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import LINEARS, tiny_llama, with_lora
from torch import Tensor

from potluck.errors import BadInput
from potluck.job_sections import Lora
from potluck.models.adapter import adapter_config, linear_of, read_config, read_tensors, write_adapter

LORA = Lora(rank=4, alpha=8, dropout=0.1)


def named_like_the_model(adapted: PeftModel) -> dict[str, Tensor]:
    """Its LoRA tensors under the names of the model's own state dict."""
    return {
        name.removeprefix("base_model.model.").replace(".default", ""): parameter
        for name, parameter in adapted.named_parameters()
        if "lora_" in name
    }


@pytest.mark.parametrize("targets", [LINEARS, ["q_proj"], ["model.layers.1.mlp.down_proj"]])
def test_same_files_as_peft_and_the_same_logits(tmp_path: Path, targets: list[str]) -> None:
    ids = torch.tensor([[1, 5, 9, 33]])
    adapted = with_lora(tiny_llama(), targets, lora_dropout=0.1)
    expected = adapted(ids).logits
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    write_adapter(ours, named_like_the_model(adapted), adapter_config(LORA, "org/base", targets))
    adapted.save_pretrained(theirs)
    configs: list[dict[str, Any]] = []

    a, b = load_file(ours / "adapter_model.safetensors"), load_file(theirs / "adapter_model.safetensors")
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    for directory, base in ((ours, "org/base"), (theirs, None)):
        config = PeftConfig.from_pretrained(directory).to_dict()
        assert config.pop("base_model_name_or_path") == base
        assert sorted(config.pop("target_modules")) == sorted(targets)
        configs.append(config)
    assert configs[0] == configs[1]

    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # peft warns of missing keys
        loaded = PeftModel.from_pretrained(tiny_llama(), ours)
    assert torch.equal(loaded(ids).logits, expected)


@pytest.mark.parametrize(
    ("name", "linear"),
    [
        ("h.0.attn.c_attn.lora_A.weight", "h.0.attn.c_attn"),
        ("h.0.attn.c_attn.lora_B.bias", "h.0.attn.c_attn"),
        ("h.0.attn.c_attn.lora_magnitude_vector", "h.0.attn.c_attn"),
        ("h.0.attn.c_attn.ia3_l", "h.0.attn.c_attn"),
        ("wte.lora_embedding_A", "wte"),
        ("score.weight", None),
        ("ia3_l.weight", None),
        ("classifier.dense.bias", None),
    ],
)
def test_which_tensors_are_an_adapters(name: str, linear: str | None) -> None:
    assert linear_of(name) == linear


def test_round_trip_and_template(tmp_path: Path) -> None:
    whole = torch.randn(9, 6)  # two views of one storage, one of them not contiguous
    name = "model.layers.0.mlp.up_proj"
    tensors = {f"{name}.lora_A.weight": whole[:4], f"{name}.lora_B.weight": whole[1:5].T}
    write_adapter(tmp_path, tensors, adapter_config(LORA, "base", ["up_proj"]))
    assert not (tmp_path / "chat_template.jinja").exists()
    read = read_tensors(tmp_path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in read)
    assert read_config(tmp_path)["base_model_name_or_path"] == "base"
    write_adapter(tmp_path, tensors, read_config(tmp_path), chat_template="{{ messages }}")
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ messages }}"


def test_fractional_alpha_is_kept() -> None:
    assert adapter_config(Lora(rank=4, alpha=2.5), "base", ["q_proj"])["lora_alpha"] == 2.5


def test_what_is_no_adapter_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no adapter_config\.json"):
        read_config(tmp_path)
    with pytest.raises(BadInput, match=r"no adapter_model\.safetensors"):
        read_tensors(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text("{")
    with pytest.raises(BadInput, match="as JSON"):
        read_config(tmp_path)
    config.write_text('{"peft_type": "LOHA"}')
    with pytest.raises(BadInput, match="'LOHA'; only LORA and IA3"):
        read_config(tmp_path)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(b"12345678")
    with pytest.raises(BadInput, match="cannot be read"):
        read_tensors(tmp_path)
    save_file({"foreign": torch.zeros(1)}, weights)
    with pytest.raises(BadInput, match="holds foreign"):
        read_tensors(tmp_path)
