"""Rows in, one example out; and what its targets spell."""

import itertools

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from potluck.job_sections import Data
from potluck.texts.batch import Example
from potluck.texts.encode import encode
from potluck.texts.formats import Chat, Message, Row

Tokenizers = dict[str, PreTrainedTokenizerBase]

KINDS = ["chatml", "llama3", "gemma", "mistral", "qwen3", "thinking", "phi3", "plain"]
USES_BOS = {"llama3", "gemma", "mistral"}
END_OF_TURN = {
    "chatml": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "mistral": "</s>",
    "qwen3": "<|im_end|>",
    "thinking": "<|im_end|>",
    "phi3": "<|end|>",
    "plain": "<|endoftext|>",
}

# No unassigned or private characters (a stand-in uses the latter), no half surrogates, no sentencepiece space.
characters = st.characters(exclude_categories=["Cs", "Co", "Cn"], exclude_characters="▁\0")
words = st.sampled_from(
    ["light", "turn on", " the", "\n", "\n\n", " ", "  ", "user:", "a", "é", "日本", "<", "|im_end|"]
)
contents = st.one_of(st.text(characters, max_size=12), st.lists(words, max_size=5).map("".join))


def data(**fields: object) -> Data:
    return Data.model_validate({"train": ["x.jsonl"], **fields})


def chat(*contents: str, system: str | None = None) -> Chat:
    roles = itertools.cycle(["user", "assistant"])
    turns = [Message(role, content) for role, content in zip(roles, contents, strict=False)]
    opening = [] if system is None else [Message("system", system)]
    return Chat((*opening, *turns), "x.jsonl:1", "messages")


def only(row: Row, tokenizer: PreTrainedTokenizerBase, **fields: object) -> Example:
    (example,) = encode([row], tokenizer, data(**fields)).examples
    return example


def runs_of_targets(example: Example) -> list[list[int]]:
    runs: list[list[int]] = []
    for position, supervised in enumerate(example.supervised):
        if supervised and not example.supervised[position - 1]:
            runs.append([])
        if supervised:
            runs[-1].append(example.ids[position])
    return runs


def decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int], special: bool = False) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False))
