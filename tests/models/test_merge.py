from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, PeftModel, get_peft_model
from safetensors.torch import save_file
from tiny_models import LINEARS, save_tiny, tiny_llama, with_lora
from transformers import AutoModelForCausalLM

from potluck.errors import BadInput
from potluck.models.adapter import read_config, read_tensors, write_adapter
from potluck.models.checkpoint import Checkpoint
from potluck.models.merge import merge

IDS = torch.tensor([[1, 5, 9, 33, 2, 7]])


def save_adapter(directory: Path, targets: list[str] | str, tied: bool = True, **options: Any) -> Path:
    with_lora(tiny_llama(tied), targets, **options).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("tied", "targets"), [(True, LINEARS), (False, [*LINEARS, "lm_head"])])
def test_logits_before_and_after(tmp_path: Path, tied: bool, targets: list[str], dtype: torch.dtype) -> None:
    base = save_tiny(tmp_path / "base", tied, dtype)
    adapter = save_adapter(tmp_path / "adapter", targets, tied)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=wide), adapter)(IDS).logits
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=wide)(IDS).logits
    merge(adapter, base, tmp_path / "merged", overwrite=False)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == dtype
    found = merged.to(wide)(IDS).logits
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.2}[dtype]
    assert (found - expected).abs().max() < tolerance
    assert (plain - expected).abs().max() > 10 * tolerance
    with Checkpoint.open(tmp_path / "merged") as checkpoint, Checkpoint.open(base) as before:
        assert checkpoint.names == before.names
        assert ("lm_head.weight" in checkpoint.names) == (not tied)
        assert {checkpoint.dtype(name) for name in checkpoint.names} == {dtype}


def test_rslora_scale(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", ["v_proj"], use_rslora=True)
    expected = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)(IDS).logits
    merge(adapter, base, tmp_path / "merged", overwrite=False)
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits
    assert torch.allclose(found, expected, atol=1e-4)


def test_a_tied_head_in_the_file_is_written_once(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    with Checkpoint.open(base) as checkpoint:
        tensors = {name: checkpoint.read(name) for name in checkpoint.names}
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, base / "model.safetensors")
    merge(save_adapter(tmp_path / "adapter", ["q_proj"]), base, tmp_path / "merged", overwrite=False)
    with Checkpoint.open(tmp_path / "merged") as checkpoint:
        assert checkpoint.names == tuple(sorted(tensors))


def test_what_lies_beside_the_weights_is_copied(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    for name in ("tokenizer.json", "tokenizer.model", "chat_template.jinja", "NOTICE", "pytorch_model.bin"):
        (base / name).write_text(f"base's {name}")
    adapter = save_adapter(tmp_path / "adapter", ["q_proj"])
    merge(adapter, base, tmp_path / "merged", overwrite=False)
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer.model", "chat_template.jinja", "NOTICE"),
    }
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "base's chat_template.jinja"
    (adapter / "chat_template.jinja").write_text("the job's own")
    merge(adapter, base, tmp_path / "merged", overwrite=True)
    assert (tmp_path / "merged" / "chat_template.jinja").read_text() == "the job's own"


def test_files_of_the_adapters_come_along(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", ["q_proj"])
    (adapter / "job.yaml").write_text("seed: 7")
    merge(adapter, base, tmp_path / "merged", overwrite=False, along=["job.yaml", "none.txt"])
    assert (tmp_path / "merged" / "job.yaml").read_text() == "seed: 7"
    assert not (tmp_path / "merged" / "none.txt").exists()


def test_what_cannot_be_merged_is_said_and_nothing_written(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    output = tmp_path / "merged"

    def refused(adapter: Path, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            merge(adapter, base, output, overwrite=False)
        assert not output.exists()

    short = save_adapter(tmp_path / "dora", ["q_proj"], use_dora=True)
    lacking = {
        n: t for n, t in read_tensors(short).items() if n != "model.layers.1.self_attn.q_proj.lora_magnitude_vector"
    }
    write_adapter(short, lacking, read_config(short))
    refused(short, r"lacks model\.layers\.1\.self_attn\.q_proj\.lora_magnitude_vector")
    refused(save_adapter(tmp_path / "bias", ["q_proj"], bias="all"), "uses bias")
    refused(save_adapter(tmp_path / "head", ["lm_head"]), "adapts lm_head, which has no weight of its own")
    refused(save_adapter(tmp_path / "embedding", ["embed_tokens"]), r"embed_tokens\.lora_embedding_A is no half")
    adapter = save_adapter(tmp_path / "adapter", ["q_proj"])
    tensors = read_tensors(adapter)
    name = "model.layers.1.self_attn.q_proj.lora_B.weight"
    write_adapter(adapter, {**tensors, name: torch.zeros(31, 4)}, read_config(adapter))
    refused(adapter, r"q_proj\.weight has shape \(32, 32\), .* \(31, 4\) and \(4, 32\)")
    del tensors[name]
    write_adapter(adapter, tensors, read_config(adapter))
    refused(adapter, r"layers\.1\.self_attn\.q_proj\.lora_A\.weight is no half")
    write_adapter(adapter, tensors, {**read_config(adapter), "r": 0})
    refused(adapter, "gives no rank")
    with pytest.raises(BadInput, match="is or holds"):
        merge(adapter, base, base, overwrite=True)
    with pytest.raises(BadInput, match="is or holds"):
        merge(adapter, base, adapter, overwrite=True)


@pytest.mark.parametrize("kind", ["lora", "ia3", "regex"])
def test_an_adapter_that_lost_a_linears_tensors_is_refused(tmp_path: Path, kind: str) -> None:
    base, adapter = save_tiny(tmp_path / "base"), tmp_path / "adapter"
    if kind == "ia3":
        targets = ["k_proj", "down_proj"]
        ia3 = IA3Config(target_modules=targets, feedforward_modules=["down_proj"], task_type="CAUSAL_LM")
        get_peft_model(tiny_llama(), ia3).save_pretrained(adapter)
    else:
        save_adapter(adapter, r".*\.(k|down)_proj" if kind == "regex" else ["k_proj", "down_proj"])
    merge(adapter, base, tmp_path / "whole", overwrite=False)
    lost = "model.layers.1.self_attn.k_proj"
    left = {name: tensor for name, tensor in read_tensors(adapter).items() if not name.startswith(f"{lost}.")}
    write_adapter(adapter, left, read_config(adapter))
    with pytest.raises(BadInput, match=rf"names {lost}, but it has no tensors for it: copy the adapter again"):
        merge(adapter, base, tmp_path / "merged", overwrite=False)
    assert not (tmp_path / "merged").exists()


def test_only_the_blocks_that_an_adapter_names_need_tensors(tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", ["q_proj"], layers_to_transform=[1])
    merge(adapter, save_tiny(tmp_path / "base"), tmp_path / "merged", overwrite=False)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
