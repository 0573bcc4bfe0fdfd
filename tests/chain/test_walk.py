"""The walk by hand: only supervised positions are walked once nothing looks at the others, and no gradient changes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from pool.tiny import config, save_tiny, shares
from potluck.chain.comm import Comm
from potluck.chain.piece import At, Chain
from potluck.chain.walk import backward, forward
from potluck.job_sections import Lora
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from worlds import run_world

D = 45
ALONE = ([9], [26], [61])
TWO = ([5, 4], [26, 0], [31, 30])
THREE = ([4, 0, 5], [13, 13, 0], [31, 30, 0])


@dataclass(frozen=True)
class Half:
    """One half-batch: its first residual stream, its supervised positions and the gradient that the loss gave them."""

    x_BSD: Tensor
    supervised_N: Tensor
    gradient_1ND: Tensor


@dataclass(frozen=True)
class Walked:
    hidden: list[Tensor]
    gradients: dict[str, Tensor]


def half(B: int, S: int, supervised: Sequence[int], seed: int) -> Half:
    generator = torch.Generator().manual_seed(seed)
    x_BSD = torch.randn(B, S, D, generator=generator, dtype=torch.float64)
    gradient_1ND = torch.randn(1, len(supervised), D, generator=generator, dtype=torch.float64)
    return Half(x_BSD, torch.tensor(supervised, dtype=torch.long), gradient_1ND)


FIRST, SECOND = half(2, 5, [0, 3, 8], 1), half(1, 4, [1, 2], 2)
SILENT = half(2, 3, [], 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(save_tiny(config("llama"), tmp_path_factory.mktemp("model")))


def chain_of(
    checkpoint: Checkpoint, rank: int, counts: tuple[list[int], list[int], list[int]], targets: Sequence[str] | None
) -> Chain:
    cfg = config("llama")
    lora = None if targets is None else Lora(rank=4, targets=list(targets))
    plan = shares(cfg, *counts)
    chain = build_part(checkpoint, decoder_of(cfg), plan, rank, compute=torch.float64, adapter=lora, seed=0).chain
    for i, t in enumerate(chain.trained if lora else []):
        t.local.detach().copy_(torch.randn(t.local.shape, generator=torch.Generator().manual_seed(i)) * 0.3)
    return chain


def walked(chain: Chain, halves: Sequence[Half], comm: Comm, *, checkpointing: bool = False) -> Walked:
    for t in chain.trained:
        t.local.grad = None
    ats = [At(seed=0, step=0, micro_batch=0, half=j) for j in range(len(halves))]
    positions = [each.supervised_N for each in halves]
    hidden, tapes = forward(chain, [each.x_BSD for each in halves], positions, ats, comm, checkpointing=checkpointing)
    for h_1ND, each in zip(hidden, halves, strict=True):
        assert h_1ND.shape == each.gradient_1ND.shape
        assert not h_1ND.requires_grad
    backward(chain, tapes, [each.gradient_1ND for each in halves], comm)
    gradients = {t.name: t.local.grad for t in chain.trained if t.local.grad is not None}
    return Walked([h.clone() for h in hidden], {name: g.clone() for name, g in gradients.items()})


def assert_alike(found: Walked, expected: Walked) -> None:
    for ours, theirs in zip(found.hidden, expected.hidden, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-11, atol=1e-11)
    assert found.gradients.keys() == expected.gradients.keys()
    for name, theirs in expected.gradients.items():
        assert torch.allclose(found.gradients[name], theirs, rtol=1e-11, atol=1e-11), name


def on_every_rank(world_size: int, body: Callable[[Comm], None]) -> None:
    run_world(world_size, body) if world_size > 1 else body(Comm())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize(
    "targets",
    [None, ["all-linear"], ["layers.1.mlp.up_proj"], ["layers.1.self_attn.o_proj"], ["layers.0.mlp.down_proj"]],
    ids=str,
)
@pytest.mark.parametrize("counts", [ALONE, TWO, THREE], ids=["1", "2", "3"])
def test_where_positions_are_dropped_and_a_half_without_any_change_no_gradient(
    checkpoint: Checkpoint,
    counts: tuple[list[int], list[int], list[int]],
    targets: list[str] | None,
    checkpointing: bool,
) -> None:
    def body(comm: Comm) -> None:
        early = chain_of(checkpoint, comm.rank, counts, targets)
        assert early.pointwise_from == len(early.links) - 1
        late = replace(early, pointwise_from=len(early.links))
        reference = walked(late, [FIRST, SECOND], comm)
        assert len(reference.gradients) == len(early.trained) > 0
        assert_alike(walked(early, [FIRST, SECOND], comm, checkpointing=checkpointing), reference)

        alone = walked(late, [FIRST], comm)
        for chain in (early, late):
            beside = walked(chain, [FIRST, SILENT], comm, checkpointing=checkpointing)
            assert beside.hidden.pop().shape == (1, 0, D)
            assert_alike(beside, alone)
        if comm.rank == 0:  # which has a part of everything
            assert any(not torch.allclose(alone.gradients[name], g) for name, g in reference.gradients.items())

    on_every_rank(len(counts[0]), body)


@pytest.mark.parametrize("dropped", [True, False], ids=["early", "late"])
def test_dropped_positions_are_those_whose_gradient_is_zero(checkpoint: Checkpoint, dropped: bool) -> None:
    """Walking every position with a gradient that is 0 where there is no target: the same, at more cost."""
    chain = chain_of(checkpoint, 0, ALONE, None)
    if not dropped:
        chain = replace(chain, pointwise_from=len(chain.links))
    found = walked(chain, [FIRST], Comm())
    B, S, _ = FIRST.x_BSD.shape
    everywhere_1ND = torch.zeros(1, B * S, D, dtype=torch.float64)
    everywhere_1ND[:, FIRST.supervised_N] = FIRST.gradient_1ND
    whole = walked(chain, [Half(FIRST.x_BSD, torch.arange(B * S), everywhere_1ND)], Comm())
    assert_alike(found, replace(whole, hidden=[whole.hidden[0][:, FIRST.supervised_N]]))


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
def test_with_the_last_norm_alone_trained_no_link_is_walked_back(checkpoint: Checkpoint, checkpointing: bool) -> None:
    whole = chain_of(checkpoint, 0, ALONE, None)
    (norm,) = whole.last_trained
    expected = walked(whole, [FIRST, SECOND], Comm()).gradients[norm.name]
    frozen = tuple(replace(link, replicated_trained=(), sharded_trained=()) for link in whole.links)
    for pointwise_from in (len(frozen) - 1, len(frozen)):
        chain = replace(whole, links=frozen, pointwise_from=pointwise_from)
        found = walked(chain, [FIRST, SECOND], Comm(), checkpointing=checkpointing)
        assert list(found.gradients) == [norm.name]
        assert torch.allclose(found.gradients[norm.name], expected, rtol=1e-11, atol=1e-11)
