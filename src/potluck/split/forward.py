"""A client's examples through its frozen part: what the server will never see the ids of."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from potluck.chain.piece import At
from potluck.split.parts import ClientPart
from potluck.split.records import Record
from potluck.texts.batch import Example
from potluck.texts.collate import collate
from potluck.texts.order import Order

_TOKENS_AT_ONCE = 512
_FROZEN = At(seed=0, step=0, micro_batch=0, half=0)


def records(part: ClientPart, examples: Sequence[Example], batch_size: int = 16) -> Iterator[Record]:
    """Each example's activations, in batches of similar length, in an order that is the same each time."""
    if not examples:
        return
    order = Order([len(example.ids) for example in examples], batch_size, seed=0)
    for step in range(order.batches_per_epoch):
        for batch in _bounded([examples[i] for i in order.indices(step)]):
            with torch.no_grad():
                streams = activations(part, batch, _FROZEN).float().split([len(example.ids) - 1 for example in batch])
            for example, x_TD in zip(batch, streams, strict=True):
                yield record_of(example, x_TD)


def _bounded(batch: Sequence[Example]) -> Iterator[list[Example]]:
    """Parts of a batch with few enough tokens for a small device's memory, or with one example."""
    part: list[Example] = []
    for example in batch:
        if part and max(len(example.ids), *(len(e.ids) for e in part)) * (len(part) + 1) > _TOKENS_AT_ONCE:
            yield part
            part = []
        part.append(example)
    yield part


def record_of(example: Example, x_TD: Tensor) -> Record:
    """An example with its activations."""
    positions = supervised_positions(example)
    return Record(x_TD, example.ids[:-1], positions, tuple(example.ids[p + 1] for p in positions))


def supervised_positions(example: Example) -> tuple[int, ...]:
    """Positions whose next token is a target."""
    return tuple(token - 1 for token in range(1, len(example.ids)) if example.supervised[token])


def activations(part: ClientPart, examples: Sequence[Example], at: At) -> Tensor:
    """The stream at the cut, ``[sum of T, D]``, example after example; the last token of each is only a target."""
    inputs = [Example(e.ids[:-1], e.supervised[:-1], e.where, e.prompt_length, e.answer) for e in examples]
    batch = collate(inputs)
    S = batch.ids_BS.shape[1]
    kept_N = torch.cat([row * S + torch.arange(length) for row, length in enumerate(batch.layout.lengths)])
    return part(batch.ids_BS, kept_N, at)
