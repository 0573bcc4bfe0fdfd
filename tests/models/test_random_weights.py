"""Random weights have the names and shapes of the real model, and build the same chain."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from potluck.chain.ranges import Ranges, split_by
from potluck.chain.share import Share
from potluck.models.build import build_part
from potluck.models.families import decoder_of
from potluck.models.random_weights import RandomWeights

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 44,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("kind", "differs"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        (MistralConfig, {}),
        (Qwen2Config, {}),
        (Qwen3Config, {"attention_bias": True}),
        (Gemma3TextConfig, {"layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_names_and_shapes_are_the_real_models(
    kind: type[PretrainedConfig], differs: dict[str, object], tied: bool
) -> None:
    config = kind(**SHAPE | differs, tie_word_embeddings=tied)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    real = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    weights = RandomWeights(decoder_of(config))
    assert {name: weights.shape(name) for name in weights.names} == real
    assert list(weights.names) == sorted(real)


def test_parts_are_of_the_size_asked_for() -> None:
    config = LlamaConfig(**SHAPE)
    weights = RandomWeights(decoder_of(config))
    part = weights.read("model.layers.1.mlp.down_proj.weight", dtype=torch.bfloat16, columns=Ranges(((1, 3), (5, 6))))
    assert part.shape == (44, 3)
    assert part.dtype == torch.bfloat16
    assert part.count_nonzero() > 100
    assert weights.rows("model.embed_tokens.weight", [3, 3, 1]).shape == (3, 44)
    assert torch.equal(weights.read("model.norm.weight"), torch.ones(44))


def test_a_chain_of_them_has_the_shares_units() -> None:
    config = Gemma3TextConfig(**SHAPE, layer_types=["sliding_attention", "full_attention"])
    counts = ([3, 1], [10, 16], [60, 1])
    shares = [Share(*each) for each in zip(*(split_by(count) for count in counts), strict=True)]
    weights = RandomWeights(decoder_of(config))
    part = build_part(weights, decoder_of(config), shares, 0, compute=torch.float32, adapter=None, seed=0)
    of_block = {t.name.removeprefix("model.layers.1."): tuple(t.local.shape) for t in part.chain.trained}
    assert of_block["self_attn.q_proj.weight"] == (3 * 8, 44)
    assert of_block["mlp.down_proj.weight"] == (44, 10)
    assert part.head.W_VD.shape == (60, 44)
