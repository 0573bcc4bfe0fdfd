"""Scores of classifiers, against one text at a time and against the formulas."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import save_tiny
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    RobertaConfig,
)

from potluck.errors import BadInput
from potluck.models.adapter import read_config, read_tensors, write_adapter
from potluck.models.evaluate_classes import ClassScores, _of_classes, _of_values, evaluate_classes, logits_of
from potluck.models.inference import load_classifier
from potluck.texts.batch import Example

VOCABULARY = 24
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "word_embed_proj_dim": 32,
}
CONFIGS = {
    "bert": lambda pad: BertConfig(**SHAPE, pad_token_id=0),
    "roberta": lambda pad: RobertaConfig(**SHAPE, pad_token_id=1, type_vocab_size=1),
    "llama": lambda pad: LlamaConfig(**SHAPE, pad_token_id=pad),
    "gpt2": lambda pad: GPT2Config(**SHAPE, pad_token_id=pad),
    "opt": lambda pad: OPTConfig(**SHAPE, ffn_dim=48, pad_token_id=pad),
}


def classifier(family: str, pad: int | None, classes: int = 3) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[family](pad)
    config.num_labels = classes
    return AutoModelForSequenceClassification.from_config(config).eval()


def example(ids: list[int], label: float, types: list[int] | None = None) -> Example:
    told = None if types is None else tuple(types)
    return Example(tuple(ids), (False,) * len(ids), "x:1", len(ids), None, label, 0, told)


def texts(family: str, count: int = 20) -> list[Example]:
    """Of several lengths; some end in what pads others, as texts of decoders may."""
    rng = random.Random(1)
    ids = [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(2, 12))] for _ in range(count)]
    if family in ("bert", "roberta"):
        typed = family == "bert"
        return [
            example(row, i % 3, [0, *[1] * (len(row) - 1)] if typed and i % 2 else None) for i, row in enumerate(ids)
        ]
    return [example([*row, 2] if i % 2 else row, i % 3) for i, row in enumerate(ids)]


@torch.inference_mode()
def alone(model: Any, one: Example) -> torch.Tensor:
    """One text, which needs no padding, and without which a decoder's last token is the last."""
    config = model.config
    kept, config.pad_token_id = config.pad_token_id, None
    types = {} if one.types is None else {"token_type_ids": torch.tensor([one.types])}
    logits_C: torch.Tensor = model(input_ids=torch.tensor([one.ids]), **types).logits[0]
    config.pad_token_id = kept
    return logits_C


@pytest.mark.parametrize("pad", [2, None, -1, 23])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_batch_gives_what_each_text_gives_alone(family: str, pad: int | None) -> None:
    model = classifier(family, pad)
    padded_with = model.config.pad_token_id
    examples = texts(family)
    expected = torch.stack([alone(model, one) for one in examples])
    torch.testing.assert_close(logits_of(model, examples), expected, rtol=1e-4, atol=1e-5)
    assert model.config.pad_token_id == padded_with


def test_every_token_ends_a_text() -> None:
    model = classifier("llama", 2)
    examples = [example([3 + i % 5, *range(i % 3), i], 0) for i in range(VOCABULARY)]
    expected = torch.stack([alone(model, one) for one in examples])
    torch.testing.assert_close(logits_of(model, examples), expected, rtol=1e-4, atol=1e-5)


def test_scores_do_not_depend_on_the_batch() -> None:
    model, examples, seen = classifier("llama", None), texts("llama"), []
    logits = torch.stack([alone(model, one) for one in examples])
    labels = torch.tensor([int(one.label or 0) for one in examples])
    expected = _of_classes(logits, labels)
    for batch_size in (1, 3, 50):
        scores = evaluate_classes(
            model, examples, classes=3, batch_size=batch_size, progress=lambda *told: seen.append(told)
        )
        assert scores.loss == pytest.approx(expected.loss, rel=1e-5)
        assert (scores.accuracy, scores.f1, scores.matthews) == (expected.accuracy, expected.f1, expected.matthews)
        assert (scores.pearson, scores.spearman, scores.examples) == (None, None, 20)
        assert seen[-1] == (20, 20)
    with pytest.raises(BadInput, match="nothing to evaluate"):
        evaluate_classes(model, [], classes=3, batch_size=4)


def saying(classes: list[int], of: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(classes), of).float()


def test_scores_of_two_classes() -> None:
    right = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]
    said = [1, 1, 1, 0, 1, 0, 0, 0, 0, 0]  # of the second class: 3 found, 1 missed, 1 wrongly
    scores = _of_classes(saying(said, 2), torch.tensor(right))
    assert scores.accuracy == pytest.approx(0.8)
    assert scores.f1 == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert scores.matthews == pytest.approx((3 * 5 - 1 * 1) / (4 * 4 * 6 * 6) ** 0.5)
    wrong_loss, right_loss = (torch.tensor([1.0, 0.0]).logsumexp(0).item() - logit for logit in (0.0, 1.0))
    assert scores.loss == pytest.approx(0.2 * wrong_loss + 0.8 * right_loss)


def test_scores_of_three_classes_and_of_one_answer() -> None:
    scores = _of_classes(saying([0, 1, 1, 2], 3), torch.tensor([0, 1, 2, 2]))
    assert scores.f1 == pytest.approx((1.0 + 2 / 3 + 2 / 3) / 3)
    scores = _of_classes(saying([0, 0, 0], 2), torch.tensor([0, 1, 1]))
    assert (scores.f1, scores.matthews) == (0.0, 0.0)


def test_scores_of_values() -> None:
    scores = _of_values(torch.tensor([1.0, 2.0, 9.0]), [0.0, 1.0, 2.0])
    assert scores.loss == pytest.approx((1 + 1 + 49) / 3)
    assert scores.spearman == pytest.approx(1.0)
    assert scores.pearson == pytest.approx(8 / (2 * (9 + 4 + 25)) ** 0.5)
    assert scores.accuracy is None
    for said, labels in (([1.0, 1.0], [0.0, 1.0]), ([0.0, 1.0], [2.0, 2.0]), ([1.0], [2.0])):
        scores = _of_values(torch.tensor(said), labels)
        assert (scores.pearson, scores.spearman) == (None, None)


def test_values_of_a_model_with_one_output() -> None:
    model = classifier("bert", 0, classes=1)
    examples = [example(list(one.ids), float(i)) for i, one in enumerate(texts("bert", 6))]
    said = torch.stack([alone(model, one) for one in examples])[:, 0]
    scores = evaluate_classes(model, examples, classes=0, batch_size=2)
    assert isinstance(scores, ClassScores)
    assert scores.loss == pytest.approx(((said - torch.arange(6.0)) ** 2).mean().item(), rel=1e-4)
    assert scores.pearson == pytest.approx(
        torch.corrcoef(torch.stack([said, torch.arange(6.0)]))[0, 1].item(), abs=1e-5
    )


def test_a_head_comes_with_the_adapter(tmp_path: Path) -> None:
    base, adapter = save_tiny(tmp_path / "base"), tmp_path / "adapter"
    model = AutoModelForSequenceClassification.from_pretrained(base, num_labels=4)
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS")).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter))
    adapted.save_pretrained(adapter)
    loaded = load_classifier(base, adapter, torch.float32, classes=4)
    ids = torch.tensor([[1, 5, 9]])
    assert torch.equal(loaded(ids).logits, adapted(ids).logits)
    assert not loaded.training
    config, tensors = read_config(adapter), read_tensors(adapter)
    assert "score.weight" in tensors
    write_adapter(adapter, {name: tensor for name, tensor in tensors.items() if name != "score.weight"}, config)
    with pytest.raises(BadInput, match=r"lacks score\.weight"):
        load_classifier(base, adapter, torch.float32, classes=4)
    write_adapter(adapter, tensors, config)
    with pytest.raises(BadInput, match="does not fit the model"):
        load_classifier(base, adapter, torch.float32, classes=3)


def test_a_head_for_another_number_of_classes(tmp_path: Path) -> None:
    classifier("llama", 2).save_pretrained(tmp_path / "three")
    assert load_classifier(tmp_path / "three", None, torch.float32, classes=3).config.num_labels == 3
    with pytest.raises(BadInput, match="cannot be loaded"):
        load_classifier(tmp_path / "three", None, torch.float32, classes=4)
