"""What a plan is for: the size of the model, of a step and of its messages, counted and not measured."""

import math
from dataclasses import astuple, dataclass, replace

import numpy as np

from potluck.job import Job
from potluck.job_sections import IA3, Lora
from potluck.models.families.decoder import Decoder
from potluck.models.optimizer import MOMENTS
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


def without(amounts: PerUnit, others: PerUnit, times: float) -> PerUnit:
    """Amounts less so many times others."""
    return PerUnit(*(a - times * b for a, b in zip(astuple(amounts), astuple(others), strict=True)))


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
    of_chain, lowest = _trained(job, decoder), lowest_link(job, decoder)
    trained, partial, whole = _with_sequence_head(*of_chain, job, decoder)
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
        weights=_weights(job, decoder, of_chain[0], trained, compute, stepped_bytes),
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


def _elements(decoder: Decoder, frozen_blocks: int = 0) -> PerUnit:
    """Elements of the model, without what is frozen with its first blocks, by unit.

    The embedding is read from disk row by row and is not held.
    """
    D, L = decoder.hidden_size, len(decoder.layers) - frozen_blocks
    a_norm = 2 if decoder.norm == "layer" else 1
    norms = len(list(decoder.norm_names())) * a_norm
    ends = (None if frozen_blocks else decoder.names.embedding_norm, decoder.names.last_norm)
    at_ends = sum(name is not None for name in ends) * a_norm
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


def _weights(
    job: Job, decoder: Decoder, of_chain: PerUnit, trained: PerUnit, compute: int, stepped_bytes: float
) -> PerUnit:
    """Bytes by unit: frozen weights in the compute dtype; of trained ones the value, its gradient and moments.

    ``of_chain`` is what is trained without a head of whole sequences: without adapters, these are weights themselves.
    """
    elements, squares = _elements(decoder), _squares(job, decoder)
    exact = max(4, compute)

    def held(base: float, itself: float, stepped: float, more: float = 0.0) -> float:
        frozen = base - itself * (job.train == "full")
        return frozen * compute + stepped * stepped_bytes + more * exact

    # a trained row is cast, and its gradient found, in the compute dtype, where that is another
    in_compute = 2 * trained.vocab_row * compute * (compute < 4)
    return PerUnit(
        head=held(elements.head, of_chain.head, trained.head, squares.head),
        kv_head=held(elements.kv_head, of_chain.kv_head, trained.kv_head, squares.kv_head),
        column=held(elements.column, of_chain.column, trained.column, squares.column),
        vocab_row=held(elements.vocab_row, of_chain.vocab_row, trained.vocab_row) + in_compute,
        replicated=held(elements.replicated, of_chain.replicated, trained.replicated, squares.replicated),
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
        elements = _elements(decoder, decoder.frozen_blocks)
        per_head_norms = (len(decoder.layers) - decoder.frozen_blocks) * _head_norms(decoder)
        row = decoder.hidden_size if job.train_embeddings and decoder.embedding_is_head else 0
        by_unit = PerUnit(elements.head, elements.kv_head, elements.column, row, elements.replicated)
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
