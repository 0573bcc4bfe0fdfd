"""What a plan is for: the size of the model, of a step and of its messages, counted and not measured."""

import math
from dataclasses import dataclass, replace

import numpy as np

from potluck.job import Job
from potluck.job_sections import IA3, Lora
from potluck.models.families.decoder import Decoder
from potluck.models.sequence_head import trains_hidden
from potluck.models.targets import targets_of
from potluck.pool.profile import Work

_ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp64": 8}
ID_BYTES = 8
"""Of a token id or label on its way."""
_LOGITS_CHUNK_BYTES = 16 << 20  # what chain.loss.Head computes at once


@dataclass(frozen=True)
class PerUnit:
    """An amount in the whole model, by the unit it goes with."""

    head: float
    kv_head: float
    column: float
    vocab_row: float
    replicated: float
    """What every device has."""


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
    longest_part: float = 1.0
    """Positions of the longest row by those that graphs were measured at: memory must do for the longest batch."""

    @property
    def totals(self) -> tuple[int, int, int]:
        """Query heads, MLP columns and vocabulary rows of the model."""
        return self.heads, self.columns, self.vocab_rows

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


def task_of(job: Job, decoder: Decoder, work: Work, *, owners: int = 1, micro_batches: int | None = None) -> Task:
    """Count what a step of the job computes, keeps and sends.

    Biases are counted wherever a model of the family may have them. Adapters on a few blocks only are counted as they
    are, but time is that of walking back through all blocks.

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
    trained, partial, whole = _with_sequence_head(*_trained(job, decoder), job, decoder)
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
        weights=_weights(job, decoder, trained, compute, exact),
        trained=trained,
        checkpointing=work.checkpointing,
        longest_part=longest_part,
    )


def _elements(decoder: Decoder) -> PerUnit:
    """Elements of the model by unit; the embedding is read from disk row by row and is not held."""
    D, L = decoder.hidden_size, len(decoder.layers)
    a_norm = 2 if decoder.norm == "layer" else 1
    norms = len(list(decoder.norm_names())) * a_norm
    at_ends = sum(name is not None for name in (decoder.names.embedding_norm, decoder.names.last_norm)) * a_norm
    rows = np.array([decoder.units(name) for name in decoder.cuts])
    biases = np.array([decoder.units(name) for name, cut in decoder.cuts.items() if cut == "column"])
    head, kv_head, column = (L * (rows.sum(0) * D + biases.sum(0))).tolist()
    return PerUnit(
        head=head,
        kv_head=kv_head,
        column=column,
        vocab_row=D,
        replicated=L * ((norms + 2) * D + _head_norms(decoder)) + at_ends * D,
    )


def _head_norms(decoder: Decoder) -> int:
    """Elements of the norms of queries and keys of one block."""
    heads = {"none": 0, "each": 2, "all": decoder.num_heads + decoder.num_kv_heads}[decoder.head_norms]
    return heads * decoder.head_dim


def _weights(job: Job, decoder: Decoder, trained: PerUnit, compute: int, exact: int) -> PerUnit:
    """Bytes by unit: frozen weights in the compute dtype; of trained ones the value, its gradient and two moments."""
    elements, squares = _elements(decoder), _squares(job, decoder)
    frozen = job.train != "full"

    def held(base: float, stepped: float, more: float) -> float:
        return (base * compute if frozen else 0) + (stepped * 4 + more) * exact

    return PerUnit(
        head=held(elements.head, trained.head, squares.head),
        kv_head=held(elements.kv_head, trained.kv_head, squares.kv_head),
        column=held(elements.column, trained.column, squares.column),
        vocab_row=elements.vocab_row * compute,
        replicated=held(elements.replicated, trained.replicated, squares.replicated),
    )


def _squares(job: Job, decoder: Decoder) -> PerUnit:
    """What DoRA keeps of frozen weights: a number for each row of linears over one input, where one is adapted."""
    head = kv_head = column = replicated = 0
    if isinstance(job.adapter, Lora) and job.adapter.use_dora:
        targets, names = targets_of(job.adapter, decoder), decoder.names
        for i in range(len(decoder.layers)):
            for group in (names.qkv, names.into):
                if targets.intersection(decoder.full_name(i, name) for name in group):
                    units = np.array([decoder.units(name) for name in group]).sum(0)
                    head, kv_head, column = head + int(units[0]), kv_head + int(units[1]), column + int(units[2])
            rows = targets.intersection({decoder.full_name(i, names.o), decoder.full_name(i, names.out)})
            replicated += len(rows) * decoder.hidden_size
    return PerUnit(head, kv_head, column, 0, replicated)


def _with_sequence_head(
    trained: PerUnit, partial: float, whole: float, job: Job, decoder: Decoder
) -> tuple[PerUnit, float, float]:
    """The same with the head of whole sequences, which every device has and the owners have gradients of."""
    if decoder.sequence is None:
        return trained, partial, whole
    D = decoder.hidden_size
    head = (D + 1) * (decoder.sequence.size + D * trains_hidden(decoder, full=job.train == "full"))
    return replace(trained, replicated=trained.replicated + head), partial + head, whole + head


def _trained(job: Job, decoder: Decoder) -> tuple[PerUnit, float, float]:
    """Trained elements by unit; those whose gradients are summed over all devices; those that every device has.

    A head of whole sequences is left out.
    """
    adapter = job.adapter
    if adapter is None:
        elements = _elements(decoder)
        per_head_norms = len(decoder.layers) * _head_norms(decoder)
        by_unit = PerUnit(elements.head, elements.kv_head, elements.column, 0, elements.replicated)
        return by_unit, per_head_norms, elements.replicated
    names = [decoder.within_block(target) for target in targets_of(adapter, decoder)]
    rows = np.array([decoder.units(name) for name in names]).reshape(-1, 3)
    if isinstance(adapter, IA3):
        head, kv_head, column = rows.sum(0).tolist()
        return PerUnit(head, kv_head, column, 0, 0), 0, 0
    r = adapter.rank
    magnitudes = np.array([adapter.use_dora and decoder.cuts[name] == "column" for name in names])
    head, kv_head, column = ((r + magnitudes[:, None]) * rows).sum(0).tolist()
    replicated = len(names) * r * decoder.hidden_size
    replicated += adapter.use_dora * int((~magnitudes).sum()) * decoder.hidden_size
    return PerUnit(head, kv_head, column, 0, replicated), replicated, replicated
