"""How good the server part is on held-out records: cross-entropy over the whole vocabulary, and answers said exactly.

The server knows targets as rows of the table, not as ids. It compares with every row of the model's own table, in the
encoding in which rows were sent, so that a target's row is equal to one of them: no id has to be found out. An answer
is right where each of its targets has the largest logit: greedy generation then says exactly this answer.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.split.learner import Fed, Learner

OVERALL = "overall"
"""What the quality over all clients is called; no client may be."""

_LOGIT_BYTES = 64 << 20
_TIE = 1e-4
"""Two orders of adding up the same logit differ by less, relative to the largest."""


@dataclass(frozen=True)
class Quality:
    """What held-out records say."""

    loss: float
    """Cross-entropy over the whole vocabulary, nats a target token."""
    accuracy: float
    """Part of the examples whose every target is the model's first choice."""
    examples: int
    target_tokens: int

    @property
    def perplexity(self) -> float:
        """``exp(loss)``."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


@dataclass(frozen=True)
class Judged:
    """One example's sums."""

    client: int
    loss: float
    right: bool
    targets: int


@dataclass(frozen=True)
class Held:
    """Some held-out examples, ready for the server part."""

    fed: Fed
    """Its targets are not looked at."""
    rows_ND: Tensor
    """Each target's row of the table, as it was sent."""
    counts: tuple[int, ...]
    """Targets of each example."""
    clients: tuple[int, ...]


@torch.no_grad()
def judge(
    learner: Learner,
    held: Iterable[Held],
    table_VD: Tensor,
    softcap: float | None,
    advance: Callable[[int], None] = lambda examples: None,
) -> Iterator[Judged]:
    """Each example's loss, and whether it was answered exactly.

    Args:
        learner: with the server part to be judged.
        held: in batches.
        table_VD: the whole table, in the encoding of the targets, float32 or better.
        softcap: of the model's logits.
        advance: told how many examples are done.
    """
    for batch in held:
        loss_N, right_N = compared(learner.hidden(batch.fed, judging=True), batch.rows_ND, table_VD, softcap)
        losses, rights = loss_N.split(batch.counts), right_N.split(batch.counts)
        for client, loss, right in zip(batch.clients, losses, rights, strict=True):
            yield Judged(client, float(loss.sum()), bool(right.all()), len(loss))
        advance(len(batch.counts))


def compared(h_ND: Tensor, rows_ND: Tensor, table_VD: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """Cross-entropy ``[N]`` of targets known by their rows, and whether each has the largest logit ``[N]``."""
    h_ND = h_ND.to(table_VD.dtype)
    log_Z_N, largest_N = _over_vocabulary(h_ND, table_VD, softcap)
    own_N = _capped((h_ND * rows_ND.to(h_ND)).sum(-1), softcap)
    return log_Z_N - own_N, own_N >= largest_N - _TIE * largest_N.abs().clamp_min(1.0)


def by_client(judged: Sequence[Judged], names: Sequence[str]) -> dict[str, Quality]:
    """The quality over each client's examples, by its name, and :data:`OVERALL`; empty where there is no example."""
    if not judged:
        return {}
    found = {OVERALL: _summed_up(judged)}
    for client, name in enumerate(names):
        if theirs := [each for each in judged if each.client == client]:
            found[name] = _summed_up(theirs)
    return found


def _summed_up(judged: Sequence[Judged]) -> Quality:
    tokens = sum(each.targets for each in judged)
    return Quality(
        sum(each.loss for each in judged) / tokens,
        sum(each.right for each in judged) / len(judged),
        len(judged),
        tokens,
    )


def _over_vocabulary(h_ND: Tensor, table_VD: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """``log Z`` and the largest logit of each position, a few logits at a time."""
    rows = max(1, _LOGIT_BYTES // (len(table_VD) * table_VD.element_size()))
    log_Z, largest = [h_ND.new_empty(0)], [h_ND.new_empty(0)]
    for part_nD in h_ND.split(rows):
        logits_nV = _capped(F.linear(part_nD, table_VD), softcap)
        log_Z.append(logits_nV.logsumexp(-1))
        largest.append(logits_nV.amax(-1))
    return torch.cat(log_Z), torch.cat(largest)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
