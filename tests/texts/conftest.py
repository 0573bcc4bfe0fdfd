"""Small real tokenizers of the kinds that models have, trained here, each with a chat template of its kind."""

import json
from collections.abc import Callable

import pytest
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# A machine shared with other work can be slow at any moment; the time limit of a test run is pytest's.
settings.register_profile("potluck", deadline=None)
settings.load_profile("potluck")

CORPUS = [
    "turn on the light in the kitchen",
    "turn off the heating, please\n\nand the fan in the living room",
    "The answer is HassTurnOn. You are a helpful assistant.\n\n\nuser: hello\nassistant: hi there  friend",
] * 4

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}"
    "{% endif %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + eos_token }}"
    "{% else %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
# The last answer gets an empty thought; answers of the past lose theirs.
QWEN3 = (
    "{% for message in messages %}{% set content = message['content'] %}"
    "{% if message['role'] == 'assistant' and loop.last %}{% set content = '<think>\n\n</think>\n\n' + content %}"
    "{% endif %}{{ '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The generation prompt opens a thought that finished turns do not show.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# Only the end of the conversation has an EOS.
PHI3 = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] | upper + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)


def byte_level(special: list[str], bos: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400 + len(special),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_bos(tokenizer, bos)


def sentencepiece_like(special: list[str], bos: str | None, prepend: bool) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    steps = [normalizers.Prepend("▁")] if prepend else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prepend else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    # BPE never merges over the end of a training text; words keep the vocabulary natural.
    words = [f"▁{word}" for line in CORPUS for word in line.split(" ")]
    bytes_of_fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *special, *bytes_of_fallback], show_progress=False
    )
    tokenizer.train_from_iterator(words, trainer)
    # Training knows vocabulary of this kind only as special tokens; in the file the bytes are ordinary ones.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return with_bos(Tokenizer.from_str(json.dumps(content)), bos)


def with_bos(tokenizer: Tokenizer, bos: str | None) -> Tokenizer:
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


def fast(tokenizer: Tokenizer, template: str | None, **special: str) -> PreTrainedTokenizerBase:
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    result.chat_template = template
    return result


def _chatml() -> PreTrainedTokenizerBase:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    # As SmolLM2: a BOS is named but never added, and padding is the EOS.
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    return fast(byte_level(special, bos=None), CHATML, **names)


def _llama3() -> PreTrainedTokenizerBase:
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(special, bos="<|begin_of_text|>")
    return fast(tokenizer, LLAMA3, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>", pad_token="<|eot_id|>")


def _gemma() -> PreTrainedTokenizerBase:
    tokenizer = sentencepiece_like(
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"], bos="<bos>", prepend=False
    )
    return fast(tokenizer, GEMMA, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")


def _mistral() -> PreTrainedTokenizerBase:
    tokenizer = sentencepiece_like(["<s>", "</s>"], bos="<s>", prepend=True)
    return fast(tokenizer, MISTRAL, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>")


def _qwen(template: str) -> Callable[[], PreTrainedTokenizerBase]:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return lambda: fast(byte_level(special, bos=None), template, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def _phi3() -> PreTrainedTokenizerBase:
    special = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
    return fast(byte_level(special, bos=None), PHI3, eos_token="<|endoftext|>", pad_token="<|endoftext|>")


def _plain() -> PreTrainedTokenizerBase:
    special = ["<|endoftext|>"]
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    return fast(byte_level(special, bos=None), PLAIN, **names)


BUILDERS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "chatml": _chatml,
    "llama3": _llama3,
    "gemma": _gemma,
    "mistral": _mistral,
    "qwen3": _qwen(QWEN3),
    "thinking": _qwen(THINKING),
    "phi3": _phi3,
    "plain": _plain,
}


class Tokenizers(dict[str, PreTrainedTokenizerBase]):
    """Named tokenizers, short to print in a failure."""

    def __repr__(self) -> str:
        return f"tokenizers of kinds {', '.join(self)}"


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, PreTrainedTokenizerBase]:
    """A tokenizer of each kind. Shared: a test that changes one takes a deep copy."""
    return Tokenizers({kind: build() for kind, build in BUILDERS.items()})
