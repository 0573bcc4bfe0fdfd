"""A whole model by the book, and the same model in two parts, in float64 and with the same adapters."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PretrainedConfig

from pool.plain import PlainRun, exact_norms, plain_run
from pool.tiny import batch, config
from potluck.chain.loss import Head
from potluck.chain.trained import Trained
from potluck.job_sections import Adapter, Lora
from potluck.models.checkpoint import Checkpoint
from potluck.models.families.decoder import Decoder
from potluck.models.tables import head_of
from potluck.models.weights import Weights
from potluck.split.learner import Learner, Recipe
from potluck.split.parts import SplitPart, server_part
from potluck.texts.batch import Batch, Example

_BLOCKS = ("DecoderLayer", "GPT2Block", "GPTNeoXLayer")
BLOCKS = 3
LORA = Lora(rank=4, alpha=8.0, targets=["all-linear"])
RATE = Recipe(steps=3, learning_rate=1e-2, schedule="constant", warmup=0.0, weight_decay=0.0, clip=0.5, seed=3)
BATCH = batch((9, 7, 5), 77)


def three_blocks(family: str, *, tied: bool) -> PretrainedConfig:
    gemma = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    special = {"gemma2": gemma, "gemma3": gemma, "smollm3": {"no_rope_layers": [1, 0, 1]}}
    return config(family, num_hidden_layers=BLOCKS, tie_word_embeddings=tied, **special.get(family, {}))


def examples_of(batch: Batch) -> list[Example]:
    """A batch's rows as a client has them."""
    examples = []
    for ids_S, length, positions in zip(batch.ids_BS, batch.layout.lengths, batch.layout.positions, strict=True):
        supervised = tuple(token - 1 in positions for token in range(length))
        examples.append(Example(tuple(ids_S[:length].tolist()), supervised, "test", 0, None))
    return examples


@dataclass(frozen=True)
class Oracle:
    """One step of the whole model, adapters on all linears."""

    run: PlainRun
    streams: list[Tensor]
    """The residual stream ``[B, S, D]`` after each block, with its gradient."""


def whole_model(model_dir: Path, adapter: PeftConfig | None = None) -> Oracle:
    """``adapter``: of another kind than ``LORA``."""
    streams: list[Tensor] = []

    def keep(module: nn.Module, _: object, output: Tensor | tuple[Tensor, ...]) -> None:
        if type(module).__name__.endswith(_BLOCKS):
            x_BSD = output if isinstance(output, Tensor) else output[0]
            x_BSD.retain_grad()
            streams.append(x_BSD)

    hook = register_module_forward_hook(keep)
    try:
        with exact_norms():
            targets = ["all-linear"] if adapter is None else None
            run = plain_run(model_dir, [[BATCH]], targets=targets, rank=LORA.rank, alpha=LORA.alpha, adapter=adapter)
    finally:
        hook.remove()
    assert len(streams) == BLOCKS
    return Oracle(run, streams)


def set_adapters(trained: Sequence[Trained], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for t in trained:
            t.local.copy_(values[t.name])


def server_of(
    weights: Weights, decoder: Decoder, cut: int, *, lora: Adapter = LORA, checkpointing: bool = False
) -> SplitPart:
    return server_part(
        weights, decoder, cut, compute=torch.float64, adapter=lora, seed=RATE.seed, checkpointing=checkpointing
    )


def whole_table(checkpoint: Checkpoint, decoder: Decoder) -> Head:
    return Head(checkpoint.read(head_of(decoder), dtype=torch.float64), decoder.logit_softcap)


def random_learner(
    checkpoint: Checkpoint, decoder: Decoder, head: Head | None, rate: Recipe = RATE, lora: Lora = LORA
) -> Learner:
    """A server part behind block 0 whose adapters are all random, so that all get gradients."""
    part = server_of(checkpoint, decoder, 1, lora=lora)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for t in part.trained:
            t.local.copy_(torch.randn(t.local.shape, generator=generator, dtype=torch.float64) * 0.3)
    return Learner(part, head, rate)
