"""A tiny random model with a tokenizer of a dozen words, and four commands that it can learn in a few steps."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["<eos>", "light", "music", "door", "on", "off", "open", "->", "A", "B", "C", "D"]
ANSWERS = {"light on": "A", "light off": "B", "music on": "C", "door open": "D"}
ROWS = [{"prompt": f"{asked} ->", "completion": f" {answer}"} for asked, answer in ANSWERS.items()]


def save_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def save_word_model(directory: Path, words: Sequence[str] = WORDS, **differs: object) -> Path:
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(words),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "initializer_range": 0.3,
        "tie_word_embeddings": True,
    }
    LlamaForCausalLM(LlamaConfig(**shape | differs)).save_pretrained(directory)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return directory
