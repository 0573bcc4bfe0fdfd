"""Small random Llamas for tests of what is on disk."""

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCABULARY = 64


def tiny_llama(tied: bool = True, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def save_tiny(directory: Path, tied: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    tiny_llama(tied, dtype).save_pretrained(directory)
    return directory


def with_lora(model: Any, targets: list[str] | str, **options: Any) -> PeftModel:
    """The model with random adapters whose B is not zero."""
    adapted = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options)
    )
    generator = torch.Generator().manual_seed(1)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return adapted.eval()


def word_tokenizer(words: int) -> PreTrainedTokenizerFast:
    """``w0 w1 ...``, a token a word, after the specials ``<end> <s> <turn>`` with ids 0, 1, 2."""
    specials = ["<end>", "<s>", "<turn>"]
    tokens = [*specials, *(f"w{i}" for i in range(words))]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    tokenizer.add_special_tokens(specials)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
