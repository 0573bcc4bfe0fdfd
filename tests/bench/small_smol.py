"""SmolLM2's tokenizer with a tiny random Llama of its vocabulary, so that every task can be encoded."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from potluck.demo.run import model_file
from potluck.errors import BadInput
from potluck.models.source import resolve
from potluck.texts.tokenizer import load_tokenizer


def save_small_smol(directory: Path) -> Path:
    """Skips the test where the package with SmolLM2 is missing."""
    try:
        smol = resolve(str(model_file()), tell=lambda text: None)
    except BadInput as error:
        pytest.skip(str(error))
    config = AutoConfig.from_pretrained(smol)
    torch.manual_seed(0)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            tie_word_embeddings=True,
        )
    ).save_pretrained(directory)
    load_tokenizer(smol).save_pretrained(directory)
    return directory
