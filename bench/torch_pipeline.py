"""Torch's own ``distributed.pipelining`` over a plain transformers decoder: what our ``pipeline`` is held against.

A stage is some consecutive blocks of the model as transformers wrote it, the first with its embedding, the last with
its norm and head; torch takes the micro-batches through the stages. All micro-batches of a run have one shape.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from potluck.texts.batch import Batch

_IGNORED = -100


class PlainStage(nn.Module):
    """Some blocks of a ``...ForCausalLM``, with the embedding if they are its first, norm and head if its last."""

    def __init__(self, model: Any, blocks: range) -> None:
        """Take the blocks of ``model``, whose modules are used and not copied; ``blocks`` counts from 0."""
        super().__init__()
        inner = model.model
        self.embedding = inner.embed_tokens if blocks.start == 0 else None
        self.blocks = nn.ModuleList(inner.layers[i] for i in blocks)
        self.rotary = inner.rotary_emb
        is_last = blocks.stop == len(inner.layers)
        self.norm = inner.norm if is_last else None
        self.head = model.lm_head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        """Token ids ``[B, S]`` or the residual stream ``[B, S, D]`` to the stream or to logits ``[B, S, V]``."""
        if self.embedding is not None:
            x = self.embedding(x)
        positions_1S = torch.arange(x.shape[1])[None]
        rotation = self.rotary(x, positions_1S)
        for block in self.blocks:
            x = block(x, position_embeddings=rotation, position_ids=positions_1S, attention_mask=None)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


class TorchPipeline:
    """One rank's stage and torch's schedule of it; the default process group must have been made."""

    def __init__(
        self,
        model: Any,
        blocks: Sequence[range],
        group: ProcessGroup,
        micro_batches: int,
        *,
        schedule: Literal["1f1b", "gpipe"] = "1f1b",
    ) -> None:
        """Prepare this rank's stage.

        Args:
            model: a Llama-like ``...ForCausalLM``, adapters of PEFT in it or not; trained is what wants a gradient.
            blocks: of each rank, in order.
            group: of all ranks.
            micro_batches: of a step; ``1f1b`` wants at least as many as ranks.
            schedule: which of torch's schedules.
        """
        rank = group.rank()
        stage = PipelineStage(PlainStage(model, blocks[rank]), rank, group.size(), torch.device("cpu"), group=group)
        self._is_first, self._is_last = rank == 0, rank == group.size() - 1
        self._step_targets = 1
        kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[schedule]
        self._schedule = kind(stage, micro_batches, loss_fn=self._loss, scale_grads=False)

    def walk(self, batches: Sequence[Batch]) -> float:
        """Add a step's gradient to ``.grad`` of what this stage trains; the step's loss on the last rank, 0 elsewhere.

        Args:
            batches: the micro-batches, of equal shapes; every rank has them.
        """
        self._step_targets = sum(batch.targets_N.numel() for batch in batches)
        losses: list[Tensor] = []
        ids = (torch.cat([batch.ids_BS for batch in batches]),) if self._is_first else ()
        target = torch.cat([next_labels(batch) for batch in batches]) if self._is_last else None
        self._schedule.step(*ids, target=target, losses=losses, return_outputs=False)
        return float(torch.stack(losses).sum()) if losses else 0.0

    def _loss(self, logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
        total = F.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten(), ignore_index=_IGNORED, reduction="sum")
        return total / self._step_targets


def next_labels(batch: Batch) -> Tensor:
    """``[B, S]``: at each supervised position the token to be said after it, -100 elsewhere."""
    labels_BS = torch.full_like(batch.ids_BS, _IGNORED)
    rows = [row for row, positions in enumerate(batch.layout.positions) for _ in positions]
    columns = [position for positions in batch.layout.positions for position in positions]
    labels_BS[rows, columns] = batch.targets_N
    return labels_BS
