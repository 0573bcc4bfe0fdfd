"""A checkpoint that does not fit its config is refused in a sentence, whatever is done with it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny as save_llama
from tiny_models import tiny_llama, with_lora, word_tokenizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from pool.sequences import save_base, tiny_config
from pool.tiny import FAMILIES, config, save_tiny
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import decoder_of, for_task, read_config
from potluck.models.families.decoder import SequenceHead
from potluck.models.inference import load_classifier, load_for_inference
from potluck.models.merge import merge
from potluck.models.shapes import check_model, shapes_of
from potluck.pool.tune import tune
from potluck.split.listener import SplitListener
from potluck.split.settings import settle

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_tensors(family: str, tied: bool, tmp_path: Path) -> None:
    cfg = config(family, tie_word_embeddings=tied)
    with torch.device("meta"):
        real = {n: tuple(p.shape) for n, p in AutoModelForCausalLM.from_config(cfg).named_parameters()}
    stored_as = {"lm_head.weight": f"{decoder_of(cfg).names.head}.weight"}  # GPT-NeoX's own name for it on disk
    assert shapes_of(decoder_of(cfg)) == {stored_as.get(name, name): shape for name, shape in real.items()}
    check_model(save_tiny(cfg, tmp_path), decoder_of(cfg))


@pytest.mark.parametrize("without", [("score.", "classifier."), ("score.", "classifier.", "bert.pooler."), ()])
@pytest.mark.parametrize("family", ["bert", "roberta", "llama", "gpt2"])
def test_a_head_of_whole_sequences_may_be_there_or_not(family: str, without: tuple[str, ...], tmp_path: Path) -> None:
    cfg = tiny_config(family)
    decoder = for_task(decoder_of(cfg), SequenceHead("classes", 3))
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(cfg)
    heads = ("score.", "classifier.", "lm_head.")
    real = {n: tuple(p.shape) for n, p in model.named_parameters() if not n.startswith(heads)}
    assert {name: shape for name, shape in shapes_of(decoder).items() if not name.startswith(heads)} == real
    check_model(save_base(cfg, tmp_path, without=without or ("nothing",)), decoder)


def changed(directory: Path, change: dict[str, Any]) -> Path:
    """A saved Llama, with tensors of other values, or none; a key without a dot is a field of its config."""
    save_llama(directory)
    word_tokenizer(61).save_pretrained(directory)
    file = directory / "model.safetensors"
    tensors = {**load_file(file), **{name: value for name, value in change.items() if "." in name}}
    save_file({name: each for name, each in tensors.items() if each is not None}, file, metadata={"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    fields |= {name: value for name, value in change.items() if "." not in name}
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({Q: None}, rf"{Q}, of shape \(32, 32\), is missing\. Copy config and weights again"),
    "shape": ({Q: torch.zeros(32, 31)}, rf"{Q} has shape \(32, 31\), and by the config it has \(32, 32\)\. Copy"),
    "two": ({Q: None, "model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has shape .* 1 more does not fit"),
    "config": (
        {"intermediate_size": 40},
        r"gate_proj\.weight has shape \(48, 32\), and by the config it has \(40, 32\)\. 5 more do not fit",
    ),
    "blocks": ({"num_hidden_layers": 3}, r"model\.layers\.2\..* is missing\. 8 more do"),
    "bias": (
        {Q.replace("weight", "bias"): torch.zeros(32)},
        r"it has model\.layers\.1\.self_attn\.q_proj\.bias, and by the config that linear has no bias",
    ),
    "fewer blocks": (
        {"model.layers.2.input_layernorm.weight": torch.ones(32)},
        r"it has model\.layers\.2\.input_layernorm\.weight, and by the config block 1 is the last",
    ),
    "head norm": (
        {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)},
        r"it has model\.layers\.0\.self_attn\.q_norm\.weight, and by the config blocks have no such tensor",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_does_not_fit_is_named(case: str, tmp_path: Path) -> None:
    change, message = CHANGES[case]
    directory = changed(tmp_path / "model", change)
    refused_everywhere(directory, f"The weights in {directory} are not those of its config.json: .*{message}", tmp_path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    method = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}}
    said = r"are quantised \(bitsandbytes 8-bit, .*: use the same model with weights in float32"
    refused_everywhere(changed(tmp_path / "said", method), said, tmp_path)
    for dtype, kind in {torch.int8: "int8", torch.float8_e4m3fn: "F8_E4M3"}.items():
        directory = changed(tmp_path / kind, {Q: torch.zeros(32, 32, dtype=dtype)})
        message = (
            rf"{Q} .*(is stored as|has dtype) {kind}.*quantised weights.*use the same model with weights in float32"
        )
        refused_everywhere(directory, message, tmp_path)


def test_a_padding_id_that_is_no_token_is_refused(tmp_path: Path) -> None:
    directory = changed(tmp_path, {"pad_token_id": 1000})
    with pytest.raises(BadInput, match=r"pad_token_id 1000, .* vocab_size 64"):
        decoder_of(read_config(directory))
    with pytest.raises(BadInput, match=r"cannot be loaded: Padding_idx"):
        load_for_inference(directory, None, torch.float32)


def test_what_old_checkpoints_hold_beside_weights_is_passed_over(tmp_path: Path) -> None:
    buffers = {f"model.layers.0.self_attn.{name}": torch.ones(4) for name in ("rotary_emb.inv_freq", "masked_bias")}
    directory = changed(tmp_path, buffers | {"model.layers.5.attn.bias": torch.ones(1, dtype=torch.uint8)})
    load_for_inference(directory, None, torch.float32)


def refused_everywhere(directory: Path, whole: str, tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    examples.write_text('{"prompt": "w1 w2", "completion": " w3"}\n' * 4)
    fields = {"model": str(directory), "data": {"train": str(examples)}, "output": str(tmp_path / "out")}
    with_lora(tiny_llama(), ["up_proj"]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(BadInput, match=whole):
        tune(Job.model_validate(fields))
    with pytest.raises(BadInput, match=whole):
        settle(Job.model_validate({**fields, "split": {"cut": 1}}), SplitListener())
    with pytest.raises(BadInput, match=whole):
        load_for_inference(directory, None, torch.float32)
    with pytest.raises(BadInput, match=whole):
        load_classifier(directory, None, torch.float32, classes=3)
    with pytest.raises(BadInput, match=whole):
        merge(tmp_path / "adapter", directory, tmp_path / "merged", overwrite=False)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "merged").exists()
