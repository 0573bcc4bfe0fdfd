"""Rotary tables equal those of transformers' own modules, for every rope type and length."""

from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from potluck.models.families.rope import rope_of

TYPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 2.1, 2.2, 2.3],
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
SMALL: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "max_position_embeddings": 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("S", [1, 20, 50, 80])
@pytest.mark.parametrize("kind", TYPES)
def test_llama(kind: str, S: int, dtype: torch.dtype) -> None:
    config = LlamaConfig(**SMALL, rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **TYPES[kind]})
    expected = LlamaRotaryEmbedding(config)(torch.empty(0, dtype=dtype), torch.arange(S)[None])
    for ours, theirs in zip(rope_of(config)(S, dtype), expected, strict=True):
        assert torch.equal(ours, theirs[0])


@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
def test_a_rope_for_each_kind_of_block(layer_type: str) -> None:
    config = Gemma3TextConfig(
        **SMALL,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    )
    expected = Gemma3RotaryEmbedding(config)(torch.empty(0), torch.arange(40)[None], layer_type)
    for ours, theirs in zip(rope_of(config, layer_type)(40, torch.float32), expected, strict=True):
        assert torch.equal(ours, theirs[0])
