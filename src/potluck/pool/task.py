"""What a plan is for: the size of the model, of a step and of its messages, counted and not measured."""

import math
from dataclasses import dataclass

from potluck.job import Job
from potluck.models.families.decoder import Decoder
from potluck.models.optimizer import MOMENTS
from potluck.models.targets import targets_of
from potluck.pool.elements import PerUnit, trained_in_chain, weight_bytes, with_sequence_head
from potluck.pool.profile import Work

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
ID_BYTES = 8
"""Of a token id or label on its way."""
_LOGITS_CHUNK_BYTES = 16 << 20  # what chain.loss.Head computes at once


@dataclass(frozen=True)
class Tables:
    """Embeddings that are trained; all 0 where they are not."""

    elements: float = 0.0
    """Of those that the coordinator, or who walks the first link, holds and steps alone."""
    bytes: float = 0.0
    """Of these: values, gradients and the optimizer's moments."""
    contents_bytes: float = 0.0
    """Token ids and targets of one micro-batch, which all devices get where they share the rows of tokens; they then
    sum the first stream, which otherwise an owner sends."""
    at_both_ends_bytes: float = 0.0
    """Values of the table that both ends of a pipeline have; as much are its gradients."""


@dataclass(frozen=True)
class Task:
    """One optimizer step of one model, as far as a plan's cost follows from it."""

    layers: int
    mlp_layers: float
    """The MLP of the last block walks supervised positions only, and counts as their part of all positions."""
    heads: int
    kv_heads: int
    columns: int
    vocab_rows: int
    half_batches: int
    """In flight together."""
    micro_batches: int
    """Of one step, over all owners."""
    message_bytes: float
    """Of one half-batch between two pieces, ``B * S * D``."""
    head_message_bytes: float
    """Of the head's gradient, ``N * D``."""
    pair_bytes: float
    """Of one device's maxima and sums of the head, ``2 * N``."""
    partial_bytes: float
    """Of the gradients that are summed over all devices once a step."""
    whole_bytes: float
    """Of the values of trained tensors that every device has, sent from their homes once a step."""
    kv_trained_bytes: float
    """Trained values of one key/value head, which the devices that share it sum and send once a step."""
    kept_bytes: float
    """What checkpointing keeps of one half-batch in one block: the contents of the stream and of the sum, twice."""
    head_work_bytes: float
    """What the head needs while it works: a chunk of logits, and the gradients of the half-batches in flight."""
    weights: PerUnit
    """Bytes of weights, and of gradients and optimizer state where they are trained."""
    trained: PerUnit
    """Elements that the optimizer steps."""
    checkpointing: bool
    tables: Tables = Tables()
    """Of the first stream, if they are trained."""
    longest_part: float = 1.0
    """Positions of the longest row by those that graphs were measured at: memory must do for the longest batch."""
    lowest: int = 0
    """The lowest link in which something is trained, of the chain's two a block: those below are walked forward alone,
    and nothing of them is kept. As many as there are links where the head alone is trained."""
    lowest_sends: bool = True
    """Whether that link sends a gradient too: where its norm is trained, which comes before the message."""
    stepped_bytes: float = 16.0
    """Of a trained element: its value, its gradient, and what the optimizer keeps of it."""

    @property
    def head_passes(self) -> float:
        """How often the head's rows are read in a walk, by what was measured: once each way, twice if it is trained."""
        return 2.0 if self.trained.vocab_row else 1.0

    @property
    def totals(self) -> tuple[int, int, int]:
        """Query heads, MLP columns and vocabulary rows of the model."""
        return self.heads, self.columns, self.vocab_rows

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads

    @property
    def graphs(self) -> tuple[int, int]:
        """Links of attention and of MLP that are walked back, and so keep a graph until then."""
        return self.layers - (self.lowest + 1) // 2, self.layers - self.lowest // 2

    @property
    def walks_back(self) -> tuple[float, float]:
        """The same, by what they compute: see ``mlp_layers``."""
        attention, mlp = self.graphs
        return float(attention), max(0.0, mlp - self.layers + self.mlp_layers)

    def both_ways(self, forward_part: float) -> tuple[float, float]:
        """How many links of attention and of MLP, walked both ways, compute as much as all links are walked."""
        back = self.walks_back
        forward = (float(self.layers), self.mlp_layers)
        attention, mlp = (forward_part * f + (1 - forward_part) * b for f, b in zip(forward, back, strict=True))
        return attention, mlp

    @property
    def messages_back(self) -> float:
        """Messages between pieces of the backward walk of one half-batch; of the last MLP as of a part of one."""
        attention, mlp = self.walks_back
        return attention + mlp - (0.0 if self.lowest_sends else min(1.0, attention + mlp))


def task_of(job: Job, decoder: Decoder, work: Work, *, owners: int = 1, micro_batches: int | None = None) -> Task:
    """Count what a step of the job computes, keeps and sends.

    Biases are counted wherever a model of the family may have them.

    Args:
        job: the job.
        decoder: the model's description.
        work: the half-batch that devices were measured at.
        owners: devices that have data and take turns by micro-batch.
        micro_batches: of one step; by the job's batch sizes if left out.

    Raises:
        BadInput: an adapter's target matches nothing.
    """
    rows_a_turn = math.ceil(job.batch_size / owners)
    micro_rows = min(job.micro_batch_size or rows_a_turn, rows_a_turn)
    half_batches = min(job.half_batches, micro_rows)
    D, B, S, N = decoder.hidden_size, work.rows, work.length, work.supervised
    longest_part = max(1.0, work.longest / S)
    wire = _ITEM_BYTES[job.wire]
    compute = _ITEM_BYTES[work.dtype]
    exact = max(4, compute)
    of_chain, lowest = trained_in_chain(job, decoder), lowest_link(job, decoder)
    trained, partial, whole = with_sequence_head(*of_chain, job, decoder)
    stepped_bytes = (2 + MOMENTS[job.optimizer]) * exact
    tables = _tables(job, decoder, half_batches * (B * S + N), exact, stepped_bytes)
    logits = min(_LOGITS_CHUNK_BYTES, max(N, 1) * decoder.head_rows * exact) * (exact + compute) / exact
    return Task(
        layers=len(decoder.layers),
        mlp_layers=len(decoder.layers) - 1 + N / (B * S),
        heads=decoder.num_heads,
        kv_heads=decoder.num_kv_heads,
        columns=decoder.intermediate_size,
        vocab_rows=decoder.head_rows,
        half_batches=half_batches,
        micro_batches=micro_batches or owners * math.ceil(rows_a_turn / micro_rows),
        message_bytes=B * S * D * wire,
        head_message_bytes=N * D * wire,
        pair_bytes=2 * N * exact if decoder.head_rows else 0.0,
        partial_bytes=partial * exact,
        whole_bytes=whole * exact,
        kv_trained_bytes=trained.kv_head * exact,
        kept_bytes=2 * B * S * D * (exact + wire) * longest_part,
        head_work_bytes=logits + half_batches * N * D * (exact + compute),
        weights=weight_bytes(job, decoder, of_chain[0], trained, compute, stepped_bytes),
        trained=trained,
        checkpointing=work.checkpointing,
        tables=tables,
        longest_part=longest_part,
        lowest=lowest,
        lowest_sends=_trains_before(job, decoder),
        stepped_bytes=stepped_bytes,
    )


def _tables(job: Job, decoder: Decoder, tokens: float, exact: int, stepped_bytes: float) -> Tables:
    """What trained embeddings take; ``tokens`` are the ids and targets of one micro-batch."""
    if not job.train_embeddings:
        return Tables()
    D, names, shared = decoder.hidden_size, decoder.names, decoder.embedding_is_head
    positions = (decoder.max_positions + decoder.position_offset) * (names.positions is not None)
    segments = decoder.segments * (names.types is not None)
    elements = D * (positions + segments + decoder.vocab_size * (not shared))
    return Tables(
        elements=elements,
        bytes=stepped_bytes * elements,
        contents_bytes=tokens * ID_BYTES * shared,
        at_both_ends_bytes=D * decoder.vocab_size * exact * shared,
    )


def lowest_link(job: Job, decoder: Decoder) -> int:
    """The lowest of the chain's links, two a block, in which the job trains something.

    Raises:
        BadInput: an adapter's target matches nothing.
    """
    if job.adapter is None:
        return 2 * decoder.frozen_blocks
    targets = targets_of(job.adapter, decoder)
    of_attention = {*decoder.names.qkv, decoder.names.o}
    links = (
        2 * i + (name not in of_attention)
        for i in range(len(decoder.layers))
        for name in decoder.cuts
        if decoder.full_name(i, name) in targets
    )
    return min(links, default=2 * len(decoder.layers))


def _trains_before(job: Job, decoder: Decoder) -> bool:
    """Whether the replicated piece of the lowest trained link is trained too, or what comes before it."""
    first = decoder.frozen_blocks == 0 and decoder.names.embedding_norm is not None
    return job.train_embeddings or (job.train == "full" and (decoder.names.before_attention is not None or first))
