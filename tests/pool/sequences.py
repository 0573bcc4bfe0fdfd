"""Tiny models that tell of whole sequences, batches for them, and the plain runs that pools are compared with."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from pool.parity_models import CLIP, LEARNING_RATE
from pool.plain import PlainRun, exact_norms, is_inner, mask_of
from pool.tiny import VOCAB, config
from potluck.chain.classifier import Kind, values_of
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, for_task
from potluck.models.families.decoder import Decoder, SequenceHead
from potluck.models.targets import match_targets
from potluck.texts.batch import Batch, Layout

CLASSES = 3
HEADS = ("score.", "classifier.")
RANK, ALPHA = 4, 8.0
LENGTHS = [((9, 7, 5), (8, 3)), ((9, 7, 5), (6,)), ((4, 7, 4, 6), (8, 3))]
"""Of the rows of two micro-batches of each of three steps."""


def tiny_config(family: str, kind: Kind = "classes") -> PretrainedConfig:
    """A tiny config whose head has three classes, or gives a value."""
    told = {
        "num_labels": CLASSES if kind == "classes" else 1,
        "problem_type": "single_label_classification" if kind == "classes" else "regression",
    }
    return config(family, **told)


def save_base(cfg: PretrainedConfig, directory: Path, *, without: Sequence[str] = HEADS) -> Path:
    """A random model in float64 whose every tensor matters, without its head."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(cfg).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 2.0 / parameter.shape[-1] ** 0.5
            base = parameter if "norm" in name.lower() or "ln_" in name else torch.zeros_like(parameter)
            parameter.copy_(base + torch.randn_like(parameter) * spread)
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(tuple(without))}
    model.save_pretrained(directory, state_dict=kept)
    return directory


def description(cfg: PretrainedConfig, kind: Kind = "classes") -> Decoder:
    return for_task(decoder_of(cfg), SequenceHead(kind, CLASSES if kind == "classes" else 1))


def sequence_batch(cfg: PretrainedConfig, lengths: Sequence[int], seed: int, kind: Kind = "classes") -> Batch:
    """Random rows with a label each; in BERT's the second half of each is of another segment."""
    generator = torch.Generator().manual_seed(seed)
    ids_BS, types_BS = (torch.zeros(len(lengths), max(lengths), dtype=torch.long) for _ in range(2))
    for row, length in enumerate(lengths):
        ids_BS[row, :length] = torch.randint(3, VOCAB, (length,), generator=generator)
        types_BS[row, length // 2 : length] = 1
    classes_N = torch.randint(CLASSES, (len(lengths),), generator=generator)
    values_N = torch.randn(len(lengths), generator=generator, dtype=torch.float64)
    model = decoder_of(cfg)
    positions = tuple((0 if model.bidirectional else length - 1,) for length in lengths)
    return Batch(
        ids_BS,
        classes_N if kind == "classes" else values_N.view(torch.int64),
        Layout(tuple(lengths), positions),
        types_BS if model.segments > 1 else None,
    )


def sequence_steps(cfg: PretrainedConfig, kind: Kind = "classes") -> list[list[Batch]]:
    return [
        [sequence_batch(cfg, lengths, 10 * s + m, kind) for m, lengths in enumerate(of_step)]
        for s, of_step in enumerate(LENGTHS)
    ]


def logits_of(model: Any, batch: Batch) -> Tensor:
    """``[B, C]``."""
    fields = {"input_ids": batch.ids_BS, "attention_mask": mask_of(batch)}
    if batch.types_BS is not None:
        fields["token_type_ids"] = batch.types_BS
    logits_BC: Tensor = model(**fields).logits
    return logits_BC


def loss_of(logits_BC: Tensor, batch: Batch, kind: Kind) -> Tensor:
    """Sum over rows."""
    if kind == "classes":
        return F.cross_entropy(logits_BC, batch.targets_N, reduction="sum")
    return F.mse_loss(logits_BC[:, 0], values_of(batch.targets_N), reduction="sum")


class SequenceModels:
    """By family and kind; runs also by whether adapters are trained, or everything."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.directory = cache(self._directory)
        self.plain = cache(self._plain)
        self.checkpoint = cache(lambda family, kind="classes": Checkpoint.open(self.directory(family, kind)))

    def _directory(self, family: str, kind: Kind) -> Path:
        return save_base(tiny_config(family, kind), self._root / f"{family}-{kind}")

    def _plain(
        self,
        family: str,
        kind: Kind,
        targets: tuple[str, ...] | None,
        embeddings: bool = False,
        frozen: tuple[str, ...] = (),
    ) -> PlainRun:
        with exact_norms():
            return plain_run(self.directory(family, kind), tiny_config(family, kind), kind, targets, embeddings, frozen)


def plain_run(
    model_dir: Path,
    cfg: PretrainedConfig,
    kind: Kind,
    targets: Sequence[str] | None,
    embeddings: bool = False,
    frozen: Sequence[str] = (),
) -> PlainRun:
    """Train by the book; ``targets`` None is full fine-tuning, with frozen ``embeddings`` or with trained ones; what
    begins with ``frozen`` is not trained."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="by-the-book"
    )
    if targets is not None:
        linears = sorted(match_targets(targets, decoder_of(cfg).linears))
        model = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=linears, task_type="SEQ_CLS"))
    trained: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        wanted = is_inner(name, embeddings) if targets is None else "lora_" in name or ".modules_to_save." in name
        plain = name.removeprefix("base_model.model.").replace(".modules_to_save", "").replace(".default", "")
        wanted = wanted and not plain.startswith(tuple(frozen))
        parameter.requires_grad_(wanted)
        if wanted:
            trained[plain] = parameter
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in trained.items():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            parameter.copy_(noise if "lora_" in name or name.startswith(HEADS) else parameter + noise)
    initial = {name: p.detach().clone() for name, p in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=LEARNING_RATE, weight_decay=0.0)
    losses, gradients = [], {}
    for step, batches in enumerate(sequence_steps(cfg, kind)):
        rows = sum(len(batch.layout.lengths) for batch in batches)
        loss = sum((loss_of(logits_of(model, batch), batch, kind) / rows for batch in batches), torch.zeros(()))
        loss.backward()
        losses.append(float(loss.detach()))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    assert set(gradients) == set(trained), "every trained tensor matters"
    return PlainRun(losses, gradients, initial, {name: p.detach().clone() for name, p in trained.items()})
