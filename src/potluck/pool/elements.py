"""Elements of a model by the unit that a plan divides, those that are trained, and what bytes they take."""

from dataclasses import astuple, dataclass, replace

import numpy as np

from potluck.job import Job
from potluck.job_sections import IA3, Lora
from potluck.models.families.decoder import Decoder
from potluck.models.sequence_head import trains_hidden
from potluck.models.targets import targets_of


@dataclass(frozen=True)
class PerUnit:
    """An amount in the whole model, by the unit it goes with."""

    head: float
    kv_head: float
    column: float
    vocab_row: float
    replicated: float
    """What every device has."""


def without(amounts: PerUnit, others: PerUnit, times: float) -> PerUnit:
    """Amounts less so many times others."""
    return PerUnit(*(a - times * b for a, b in zip(astuple(amounts), astuple(others), strict=True)))


def trained_in_chain(job: Job, decoder: Decoder) -> tuple[PerUnit, float, float]:
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


def with_sequence_head(
    trained: PerUnit, partial: float, whole: float, job: Job, decoder: Decoder
) -> tuple[PerUnit, float, float]:
    """The same with the head of whole sequences, which every device has and the owners have gradients of."""
    if decoder.sequence is None:
        return trained, partial, whole
    D = decoder.hidden_size
    head = (D + 1) * (decoder.sequence.size + D * trains_hidden(decoder, full=job.train == "full"))
    return replace(trained, replicated=trained.replicated + head), partial + head, whole + head


def weight_bytes(
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
