"""What the server compares hidden states with: the clients' target embeddings, and negatives for all other tokens.

With ``h`` the server's last hidden state, ``e`` rows of the embedding table (of the head, where that is another one)
and ``y`` the target, the loss ``target`` is

    LA(h, y) = - h.e_y + log( sum over C of exp(h.e)  +  (V - |C|) / |N| * sum over N of exp(h.e) )

C: all clients' target embeddings, each distinct row once. N: rows drawn uniformly by the clients, without those of C;
each stands for ``(V - |C|) / |N|`` rows that nobody has as a target, which is the shift of its logit. With the whole
table in C and N this is cross-entropy exactly; without N, cross-entropy is larger by ``-log`` of the probability that
the model gives to C, which training on ``LA`` would ignore.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.loss import Head
from potluck.split.dataset import Tables


@dataclass(frozen=True)
class Candidates:
    """The rows of C, then those of N, and where each contribution's targets are among them."""

    rows_CD: Tensor
    targets: int
    """``|C|``: this many rows come first."""
    vocab_size: int
    places: tuple[Tensor, ...]
    """For each contribution, int64: the row here of each row of its own table."""

    @property
    def negatives(self) -> int:
        """``|N|`` after equal rows were joined and those of C taken out."""
        return len(self.rows_CD) - self.targets

    def head(self, compute: torch.dtype, softcap: float | None, device: torch.device | None = None) -> Head:
        """The head that has these rows for a vocabulary; its logits are computed in ``compute``."""
        rows = self.rows_CD.to(device, compute)
        unseen = self.vocab_size - self.targets
        if self.negatives == 0 or unseen == self.negatives:
            return Head(rows, softcap)
        shift = rows.new_zeros(len(rows), dtype=torch.promote_types(compute, torch.float32))
        shift[self.targets :] = math.log(max(1, unseen) / self.negatives)
        return Head(rows, softcap, shift_V=shift)


def candidates(tables: Iterable[Tables], vocab_size: int) -> Candidates:
    """Join the contributions' tables; rows are equal if all their bytes are.

    Args:
        tables: of each contribution.
        vocab_size: rows of the whole table.
    """
    place: dict[bytes, int] = {}
    rows: list[Tensor] = []

    def placed(row: Tensor) -> int:
        key = row.numpy().tobytes()
        if key not in place:
            place[key] = len(rows)
            rows.append(row.clone())  # a view would keep its whole table in memory
        return place[key]

    places, negatives = [], []
    for table in tables:
        places.append(torch.tensor([placed(row) for row in table.targets_UD], dtype=torch.int64))
        negatives.append(table.negatives_MD)
    targets = len(rows)
    for table_MD in negatives:
        for row in table_MD:
            placed(row)
    return Candidates(torch.stack(rows) if rows else torch.zeros(0, 0), targets, vocab_size, tuple(places))
