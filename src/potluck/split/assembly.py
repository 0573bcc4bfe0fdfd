"""Stored examples put together as the server part is fed them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from potluck.chain.loss import Head
from potluck.job_sections import Split
from potluck.models.checkpoint import Checkpoint
from potluck.models.families.decoder import Decoder
from potluck.models.tables import head_of
from potluck.split.candidates import Candidates, candidates
from potluck.split.dataset import Dataset, StoredExample, Tables
from potluck.split.encoding import decode_rows, encode_rows
from potluck.split.learner import Fed, fed_of
from potluck.split.quality import Held
from potluck.split.weights import capped_weights


@dataclass(frozen=True)
class Assembly:
    """How targets of contributions become rows of the server's head."""

    head: Head
    candidates: Candidates | None
    """None where targets are ids, which are the rows of the whole table."""

    def targets(self, example: StoredExample) -> Tensor:
        """Rows of the head, int64, for an example's targets."""
        if self.candidates is None:
            return example.targets_N
        return self.candidates.places[example.contribution][example.targets_N]

    def fed(self, examples: Sequence[StoredExample], weights: Sequence[float] | None = None) -> Fed:
        """One micro-batch; ``weights``: what a target of each example counts."""
        positions = [example.positions_N for example in examples]
        return fed_of([e.x_TD for e in examples], positions, [self.targets(e) for e in examples], weights)

    def target_rows(self, fed: Fed, table_VD: Tensor) -> Tensor:
        """Each target's row, ``[N, D]``, as it was sent; of the judging table itself where it was sent as an id."""
        rows_CD = table_VD if self.candidates is None else self.candidates.rows_CD
        return rows_CD[fed.targets_N.to(rows_CD.device)]

    def held(self, data: Dataset, table_VD: Tensor, batch_size: int = 16) -> Iterator[Held]:
        """A dataset's examples in batches of similar length, with their targets' rows, for :func:`judge`."""
        order = sorted(range(len(data)), key=lambda i: int(data.lengths[i]))
        for start in range(0, len(order), batch_size):
            part = order[start : start + batch_size]
            examples = data.read(part)
            fed = self.fed(examples)
            counts = tuple(len(example.positions_N) for example in examples)
            yield Held(fed, self.target_rows(fed, table_VD), counts, tuple(int(data.clients[i]) for i in part))


def assembly_of(
    tables: Iterator[Tables],
    checkpoint: Checkpoint,
    decoder: Decoder,
    split: Split,
    compute: torch.dtype,
    device: torch.device | None = None,
) -> Assembly:
    """The head that contributions are trained against: their own tables, or the whole table where they sent ids."""
    if split.targets == "ids":
        W_VD = checkpoint.read(head_of(decoder), dtype=compute)
        return Assembly(Head(W_VD.to(device), decoder.logit_softcap), None)
    if split.negatives == "table":
        table_VD = judging_table(checkpoint, decoder, split)
        tables = chain(tables, [Tables(table_VD[:0], table_VD)])
    joined = candidates(tables, decoder.vocab_size)
    return Assembly(joined.head(compute, decoder.logit_softcap, device), joined)


def judging_table(checkpoint: Checkpoint, decoder: Decoder, split: Split, device: torch.device | None = None) -> Tensor:
    """The whole table in float32, as rows of it look after they were sent."""
    W_VD = checkpoint.read(head_of(decoder), dtype=torch.float32)
    if split.targets == "embeddings":
        W_VD = decode_rows(encode_rows(W_VD, split.encoding))
    return W_VD.to(device)


def example_weights(data: Dataset, cap: float | None) -> list[float] | None:
    """For each client of ``data``, what one of its target tokens counts; None if all count 1.

    Raises:
        BadInput: the cap leaves weight that no client may have.
    """
    tokens = [int(data.target_counts[data.clients == c].sum()) for c in range(len(data.client_names))]
    weights = capped_weights(tokens, cap)
    return None if all(weight == 1.0 for weight in weights) else weights
