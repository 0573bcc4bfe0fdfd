"""Dropout follows from where in the run a piece is walked, and from nothing else."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pool.tiny import batch, config, save_tiny, shares
from potluck.chain.attention import Attention
from potluck.chain.comm import Comm
from potluck.chain.linear import CutLinears
from potluck.chain.low_rank import LoraPart
from potluck.chain.piece import At
from potluck.job_sections import Lora
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.pool.step import OWNER, Settings, Stepper
from potluck.pool.turns import Turn
from worlds import run_world

P = 0.3
HERE = At(seed=0, step=0, micro_batch=0, half=0)


def bare(name: str = "q", rank: int | None = None, width: int = 64) -> CutLinears:
    """A linear whose output is nothing but its dropped input: no weight, ``A`` and ``B`` are the identity."""
    eye = torch.eye(width)
    return CutLinears(name, (torch.zeros(width, width),), (None,), (width,), (LoraPart(eye, eye, 0),), 1.0, P, rank)


def kept(linears: CutLinears, at: At) -> Tensor:
    return linears(torch.ones(2, 8, 64), at) != 0


def test_the_mean_over_many_steps_is_the_output_without_dropout() -> None:
    generator = torch.Generator().manual_seed(0)
    A_RI, B_OR = torch.randn(4, 12, generator=generator), torch.randn(7, 4, generator=generator)
    W_OI, x_BSI = torch.randn(7, 12, generator=generator), torch.randn(1, 2, 12, generator=generator)
    dropped = CutLinears("q", (W_OI,), (None,), (7,), (LoraPart(A_RI, B_OR, 0),), 2.0, P)
    plain = replace(dropped, dropout=0.0)(x_BSI, HERE)
    frozen = replace(dropped, adapters=())(x_BSI, HERE)
    runs = 4000
    samples = torch.stack([dropped(x_BSI, replace(HERE, step=step)) for step in range(runs)])
    # The variance of a term x a is (x a)^2 p / (1 - p); five standard errors leave room for all 14 numbers.
    terms_BSIO = x_BSI[..., None] * (B_OR @ A_RI).T * 2.0
    error = (terms_BSIO.pow(2).sum(-2) * P / (1 - P) / runs).sqrt()
    assert ((samples.mean(0) - plain).abs() < 5 * error).all()
    assert ((plain - frozen).abs() > 20 * error).any(), "an adapter without effect would pass as well"
    assert samples.std(0).min() > 0


def test_as_many_are_dropped_as_asked_for() -> None:
    share = torch.stack([kept(bare(), replace(HERE, step=step)).float().mean() for step in range(40)]).mean()
    assert abs(float(share) - (1 - P)) < 5 * (P * (1 - P) / (40 * 2 * 8 * 64)) ** 0.5


def test_every_place_in_the_run_has_a_mask_of_its_own() -> None:
    places = [HERE, *(replace(HERE, **{field: 1}) for field in ("seed", "step", "micro_batch", "half"))]
    masks = [kept(bare(), at) for at in places]
    masks.append(kept(bare("k"), HERE))
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    assert all(torch.equal(kept(bare(), at), mask) for at, mask in zip(places, masks, strict=False))


def test_the_global_generator_is_not_touched() -> None:
    torch.manual_seed(11)
    before = torch.get_rng_state()
    kept(bare(), HERE)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(save_tiny(config("llama"), tmp_path_factory.mktemp("model")))


def test_column_cuts_drop_alike_on_all_ranks_and_row_cuts_do_not(checkpoint: Checkpoint) -> None:
    cfg = config("llama")
    plan = shares(cfg, [3, 6], [13, 13], [31, 30])
    lora = Lora(rank=4, dropout=P)
    cuts = []
    for rank in range(2):
        part = build_part(checkpoint, decoder_of(cfg), plan, rank, compute=torch.float32, adapter=lora, seed=0)
        attention = part.chain.links[0].sharded
        assert isinstance(attention, Attention)
        cuts.append((attention.qkv, attention.o))

    def mask(built: CutLinears) -> Tensor:
        return kept(bare(built.name, built.cut_input_of), HERE)

    (column_0, row_0), (column_1, row_1) = cuts
    assert all(cut.dropout == P for cut in (column_0, column_1, row_0, row_1))
    assert torch.equal(mask(column_0), mask(column_1))
    assert not torch.equal(mask(row_0), mask(row_1))


def first_gradients(checkpoint: Checkpoint, *, dropout: float, checkpointing: bool, seed: int = 0) -> list[Tensor]:
    cfg = config("llama")
    plan = shares(cfg, [6, 3], [15, 11], [40, 21])
    batches = [batch((9, 7, 5), 1), batch((6,), 2)]

    def body(comm: Comm) -> list[Tensor]:
        lora = Lora(rank=4, dropout=dropout)
        part = build_part(checkpoint, decoder_of(cfg), plan, comm.rank, compute=torch.float32, adapter=lora, seed=0)
        for i, t in enumerate(part.chain.trained):
            generator = torch.Generator().manual_seed(i)
            t.local.detach().copy_(torch.randn(t.local.shape, generator=generator) * 0.3)
        stepper = Stepper(part, comm, Settings(steps=1, learning_rate=0.1, checkpointing=checkpointing, seed=seed))
        stepper.accumulate([Turn(OWNER, batches if comm.rank == OWNER else None)])
        gradients = [t.local.grad for t in part.chain.trained]
        assert all(gradient is not None for gradient in gradients)
        return [gradient.clone() for gradient in gradients if gradient is not None]

    return [gradient for rank in run_world(2, body) for gradient in rank]


def test_recomputation_repeats_the_masks_bit_for_bit(checkpoint: Checkpoint) -> None:
    once = first_gradients(checkpoint, dropout=P, checkpointing=False)
    again = first_gradients(checkpoint, dropout=P, checkpointing=True)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    other = first_gradients(checkpoint, dropout=P, checkpointing=False, seed=1)
    without = first_gradients(checkpoint, dropout=0.0, checkpointing=False)
    assert not all(torch.equal(a, b) for a, b in zip(once, other, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(once, without, strict=True))
