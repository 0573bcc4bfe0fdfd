"""Quality is cross-entropy over the whole vocabulary, and the examples whose every target is the first choice."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cut_models import random_learner, three_blocks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pool.tiny import VOCAB, save_tiny
from potluck.chain.loss import Head
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.split import quality
from potluck.split.learner import Learner, fed_of
from potluck.split.quality import Held, Judged, Quality, by_client, judge

LOGIT_BYTES = 64 << 20
D = 45


@pytest.fixture(scope="module")
def learner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    cfg = three_blocks("llama", tied=True)
    with Checkpoint.open(save_tiny(cfg, tmp_path_factory.mktemp("model"))) as checkpoint:
        yield random_learner(checkpoint, decoder_of(cfg), None)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


TABLE_VD = drawn(VOCAB, D, seed=3) * 0.2


def held_of(lengths: list[int], targets: list[Tensor], clients: list[int], table_VD: Tensor) -> Held:
    streams = [drawn(T, D, seed=T) for T in lengths]
    positions = [torch.arange(T - len(own), T) for T, own in zip(lengths, targets, strict=True)]
    fed = fed_of(streams, positions, targets, None)
    counts = tuple(len(own) for own in targets)
    return Held(fed, table_VD[fed.targets_N], counts, tuple(clients))


def said(learner: Learner, held: Held, softcap: float | None) -> Tensor:
    """Logits of the dense computation."""
    with torch.no_grad():
        logits_NV = learner.hidden(held.fed) @ TABLE_VD.T
    return logits_NV if softcap is None else torch.tanh(logits_NV / softcap) * softcap


@pytest.mark.parametrize("softcap", [None, 2.0], ids=["plain", "soft-cap"])
def test_losses_and_first_choices_are_those_of_the_dense_computation(learner: Learner, softcap: float | None) -> None:
    lengths, clients = [6, 4, 5], [0, 2, 0]
    anything = held_of(lengths, [torch.tensor([1, 2]), torch.tensor([3]), torch.tensor([4, 5, 6])], clients, TABLE_VD)
    logits_NV = said(learner, anything, softcap)
    best = list(logits_NV.argmax(-1).split([2, 1, 3]))
    best[2][1] = (best[2][1] + 1) % VOCAB  # one of the last example's targets is not what the model would say
    held = held_of(lengths, best, clients, TABLE_VD)
    told: list[int] = []
    judged = list(judge(learner, [held, held], TABLE_VD, softcap, told.append))
    loss_N = F.cross_entropy(logits_NV, torch.cat(best), reduction="none")
    assert told == [3, 3]
    assert [each.right for each in judged] == [True, True, False] * 2
    assert [each.client for each in judged] == clients * 2
    assert [each.targets for each in judged] == [2, 1, 3] * 2
    expected = [float(part.sum()) for part in loss_N.split([2, 1, 3])]
    assert [each.loss for each in judged] == pytest.approx(expected * 2, rel=1e-12)
    assert not any(t.local.grad is not None for t in learner.part.trained)


def test_it_is_summed_up_by_target_and_by_example() -> None:
    judged = [Judged(0, 3.0, True, 2), Judged(1, 1.0, False, 6), Judged(0, 0.0, True, 2)]
    found = by_client(judged, ["ann", "bob"])["overall"]
    assert found == Quality(loss=0.4, accuracy=2 / 3, examples=3, target_tokens=10)
    assert found.perplexity == pytest.approx(math.exp(0.4))
    assert Quality(800.0, 0.0, 1, 1).perplexity == math.inf


class Sizes(TorchDispatchMode):
    """Notes the bytes of every tensor that is made, and how often logits are."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.largest, self.logits = vocab_size, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and tensor.ndim == 2 and tensor.shape[1] == self.vocab_size:
                self.largest, self.logits = max(self.largest, tensor.nbytes), self.logits + 1
        return made


@pytest.mark.parametrize("softcap", [None, 3.0], ids=["plain", "soft-cap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_logits_pass_64_mib(softcap: float | None, dtype: torch.dtype) -> None:
    V, N, width = 100_000, 200, 4
    table_VD, h_ND = drawn(V, width, seed=0, dtype=dtype), drawn(N, width, seed=1, dtype=dtype)
    assert N * V * dtype.itemsize > LOGIT_BYTES
    with Sizes(V) as judging:
        log_Z_N, largest_N = quality._over_vocabulary(h_ND, table_VD, softcap)
    with Sizes(V) as training:
        m_N, s_N, g_ND = Head(table_VD, softcap, shift_V=torch.zeros(V, dtype=dtype)).partial(h_ND)
    for sizes in (judging, training):
        assert sizes.logits > 1
        assert sizes.largest <= LOGIT_BYTES
    some = slice(N - 5, None)
    logits_nV = h_ND[some] @ table_VD.T
    logits_nV = logits_nV if softcap is None else torch.tanh(logits_nV / softcap) * softcap
    torch.testing.assert_close(log_Z_N[some], logits_nV.logsumexp(-1))
    torch.testing.assert_close(largest_N[some], logits_nV.amax(-1))
    torch.testing.assert_close((m_N + s_N.log())[some], logits_nV.logsumexp(-1))
    assert g_ND.shape == (N, width)


@pytest.mark.parametrize("vocab_size", [1, 7])
def test_no_position_is_no_logit(vocab_size: int) -> None:
    log_Z_N, largest_N = quality._over_vocabulary(torch.zeros(0, 3), torch.ones(vocab_size, 3), None)
    assert len(log_Z_N) == len(largest_N) == 0
