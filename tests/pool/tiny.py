"""Small random models and batches for parity tests."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    SmolLM3Config,
    StableLmConfig,
)

from potluck.chain.ranges import split_by
from potluck.chain.share import Share
from potluck.texts.batch import Batch, Layout

VOCAB = 61
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 45,
    "intermediate_size": 26,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


FAMILIES = [
    "llama",
    "llama-biased",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_neox",
    "gpt_neox-serial",
    "granite",
    "olmo2",
    "opt",
    "phi3",
    "smollm3",
    "stablelm",
    "stablelm-parallel",
]
"""What :func:`config` knows of decoders: each family, and its other ways to be built."""

_NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_NO_DROPOUT_IN_ENCODERS = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def config(family: str, **differs: object) -> PretrainedConfig:
    """A tiny config of a family that exercises what is special in it."""
    gemma: dict[str, object] = {
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 12,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "final_logit_softcapping": 3.0,
    }
    eight_wide: dict[str, object] = {"hidden_size": 72}  # where heads are as wide as hidden_size makes them
    half_turned = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    special: dict[str, tuple[type[PretrainedConfig], dict[str, object]]] = {
        "bert": (BertConfig, eight_wide | _NO_DROPOUT_IN_ENCODERS),
        "roberta": (RobertaConfig, eight_wide | {"pad_token_id": 1, "type_vocab_size": 1} | _NO_DROPOUT_IN_ENCODERS),
        "llama": (LlamaConfig, {}),
        "llama-biased": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
        "mistral": (MistralConfig, {"sliding_window": 4}),
        "qwen2": (Qwen2Config, {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
        "qwen3": (Qwen3Config, {}),
        "gemma2": (Gemma2Config, gemma | {"attn_logit_softcapping": 2.0}),
        "gemma3": (Gemma3TextConfig, gemma),
        "gpt2": (GPT2Config, eight_wide | {"n_inner": 26} | _NO_DROPOUT),
        "gpt_neox": (GPTNeoXConfig, eight_wide | {"rope_parameters": half_turned}),
        "gpt_neox-serial": (GPTNeoXConfig, eight_wide | {"use_parallel_residual": False}),
        "granite": (
            GraniteConfig,
            {
                "embedding_multiplier": 3.0,
                "attention_multiplier": 0.2,
                "residual_multiplier": 0.5,
                "logits_scaling": 2.0,
            },
        ),
        "olmo2": (Olmo2Config, {}),
        "opt": (OPTConfig, eight_wide | {"ffn_dim": 26, "word_embed_proj_dim": 72, "dropout": 0.0}),
        "phi3": (Phi3Config, {"sliding_window": 4, "rope_parameters": half_turned}),
        "smollm3": (SmolLM3Config, {"no_rope_layers": [1, 0]}),
        "stablelm": (
            StableLmConfig,
            eight_wide | {"use_qkv_bias": True, "rope_parameters": half_turned},
        ),
        "stablelm-parallel": (StableLmConfig, eight_wide | {"use_parallel_residual": True}),
    }
    kind, fields = special[family]
    return kind(**SHAPE | fields | differs)


def save_tiny(config: PretrainedConfig, directory: Path) -> Path:
    """A random model in float64 whose every tensor matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5
            base = parameter if "norm" in name or "ln_" in name else torch.zeros_like(parameter)
            parameter.copy_(base + torch.randn_like(parameter) * spread)
    model.save_pretrained(directory)
    return directory


def shares(config: PretrainedConfig, heads: Sequence[int], columns: Sequence[int], rows: Sequence[int]) -> list[Share]:
    """Shares by counts, which must sum to the tiny model's totals."""
    assert (sum(heads), sum(columns), sum(rows)) == (config.num_attention_heads, config.intermediate_size, VOCAB)
    return [Share(*each) for each in zip(split_by(heads), split_by(columns), split_by(rows), strict=True)]


def batch(lengths: Sequence[int], seed: int) -> Batch:
    """Random rows of which about half the tokens are targets; one row may have none."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    positions, targets = [], []
    for row, length in enumerate(lengths):
        ids_BS[row, :length] = torch.randint(3, VOCAB, (length,), generator=generator)
        chosen = [p for p in range(length - 1) if torch.rand((), generator=generator) < 0.5]
        positions.append(tuple(chosen))
        targets += [int(ids_BS[row, p + 1]) for p in chosen]
    return Batch(ids_BS, torch.tensor(targets), Layout(tuple(lengths), tuple(positions)))


def three_steps() -> list[list[Batch]]:
    """Three optimizer steps of two micro-batches, unequal in rows and lengths; one has a single row."""
    return [[batch((9, 7, 5), 10 * s), batch((6,) if s == 1 else (8, 3), 10 * s + 1)] for s in range(3)]
