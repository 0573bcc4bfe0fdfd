"""The plain single-process model, in float64: transformers and peft, with norms that do not round to float32."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.granite.modeling_granite import GraniteRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.phi3.modeling_phi3 import Phi3RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.smollm3.modeling_smollm3 import SmolLM3RMSNorm

from potluck.texts.batch import Batch


def _norm(self: nn.Module, x: Tensor) -> Tensor:
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def _norm_from_one(self: nn.Module, x: Tensor) -> Tensor:
    return (1.0 + self.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def _attention(
    module: nn.Module,
    q_BHSK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    mask: Tensor,
    scaling: float,
    softcap: float | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """By the book; transformers' own goes through float32."""
    k_BHSK, v_BHSK = (x.repeat_interleave(q_BHSK.shape[1] // x.shape[1], 1) for x in (k_BGSK, v_BGSK))
    scores = q_BHSK @ k_BHSK.transpose(-1, -2) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    mask = mask | ~mask.any(-1, keepdim=True)  # padding that sees nothing must not give NaN
    return (scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v_BHSK).transpose(1, 2), None


AttentionInterface.register("by-the-book", _attention)
AttentionMaskInterface.register(
    "by-the-book",
    lambda *args, **kwargs: sdpa_mask(
        *args, **kwargs | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    ),
)


@contextmanager
def exact_norms() -> Iterator[None]:
    """transformers' norms go through float32, which hides differences below 1e-7."""
    norms = [
        GraniteRMSNorm,
        LlamaRMSNorm,
        MistralRMSNorm,
        Olmo2RMSNorm,
        Phi3RMSNorm,
        Qwen2RMSNorm,
        Qwen3RMSNorm,
        SmolLM3RMSNorm,
    ]
    patches = [patch.object(norm, "forward", _norm) for norm in norms]
    patches += [patch.object(norm, "forward", _norm_from_one) for norm in (Gemma2RMSNorm, Gemma3RMSNorm)]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


class Lion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al., 2023, with its defaults."""

    def __init__(self, params: Any, learning_rate: float) -> None:
        super().__init__(params, {"lr": learning_rate, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].get("m", torch.zeros_like(p))
                c = 0.9 * m + (1 - 0.9) * p.grad
                p.copy_(p - group["lr"] * (torch.sign(c) + group["weight_decay"] * p))
                self.state[p]["m"] = 0.99 * m + (1 - 0.99) * p.grad


EMBEDDINGS = (
    *("embed_tokens", "embed_positions", "embed_in", "wte", "wpe"),
    *("word_embeddings", "position_embeddings", "token_type_embeddings"),
)
TABLES = (*EMBEDDINGS, "embed_out", "lm_head")


@dataclass
class PlainRun:
    losses: list[float]
    gradients: dict[str, Tensor]
    """Of the first step, by name in the whole model."""
    initial: dict[str, Tensor]
    weights: dict[str, Tensor]
    """After all steps."""


def plain_run(
    model_dir: Path,
    steps: Sequence[Sequence[Batch]],
    *,
    targets: list[str] | None,
    rank: int = 4,
    alpha: float = 8.0,
    learning_rate: float = 1e-2,
    clip: float = 0.5,
    embeddings: bool = False,
    frozen: Sequence[str] = (),
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    adapter: PeftConfig | None = None,
) -> PlainRun:
    """Train by the book; ``targets`` None is full fine-tuning, unless there is an adapter: with frozen ``embeddings``
    or with trained ones.

    What begins with one of ``frozen`` is not trained.
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64, attn_implementation="by-the-book")
    if targets is not None:
        modules = "all-linear" if targets == ["all-linear"] else targets
        model = get_peft_model(
            model, LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules, task_type="CAUSAL_LM")
        )
    elif adapter is not None:
        model = get_peft_model(model, adapter)
    adapted = targets is not None or adapter is not None
    trained = {}
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("base_model.model.").replace(".default", "")
        wanted = ("lora_" in name or "ia3_" in name) if adapted else is_inner(name, embeddings)
        parameter.requires_grad_(wanted and not plain.startswith(tuple(frozen)))
        if parameter.requires_grad:
            trained[plain] = parameter
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in trained.items():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.copy_(noise if "lora_A" in name or "lora_B" in name else parameter + noise)
    initial = {name: p.detach().clone() for name, p in trained.items()}
    decayed = [{"params": [p], "weight_decay": weight_decay * (p.ndim > 1)} for p in trained.values()]
    stepped = Lion(decayed, learning_rate) if optimizer == "lion" else torch.optim.AdamW(decayed, lr=learning_rate)
    losses, gradients = [], {}
    for step, batches in enumerate(steps):
        total = sum(batch.targets_N.numel() for batch in batches)
        loss_of_step = 0.0
        for batch in batches:
            logits_BSV = model(input_ids=batch.ids_BS, attention_mask=mask_of(batch)).logits
            rows = [b for b, positions in enumerate(batch.layout.positions) for _ in positions]
            columns = [p for positions in batch.layout.positions for p in positions]
            loss = F.cross_entropy(logits_BSV[rows, columns], batch.targets_N, reduction="sum") / total
            loss.backward()
            loss_of_step += float(loss.detach())
        losses.append(loss_of_step)
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in trained.items()}
        torch.nn.utils.clip_grad_norm_(trained.values(), clip)
        stepped.step()
        stepped.zero_grad()
    return PlainRun(losses, gradients, initial, {name: p.detach().clone() for name, p in trained.items()})


def is_inner(name: str, embeddings: bool = False) -> bool:
    """Whether a tensor is none of the tables; ``embeddings`` count as inner too if they are trained."""
    return not any(table in name for table in TABLES if not (embeddings and table in EMBEDDINGS))


def mask_of(batch: Batch) -> Tensor:
    """``[B, S]`` int64, 1 where there is no padding."""
    lengths_B = torch.tensor(batch.layout.lengths)
    return (torch.arange(batch.ids_BS.shape[1]) < lengths_B[:, None]).long()
