"""One optimizer step: its schedule, its clocks, its micro-batches, and the stop before a bad update."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pool.tiny import batch, config, save_tiny, shares, three_steps
from potluck.chain.comm import Comm
from potluck.chain.embedding import Embedding
from potluck.errors import PotluckError
from potluck.job_sections import Lora
from potluck.models.build import Part, build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.models.optimizer import scheduled
from potluck.pool.step import OWNER, Settings, Stepper, StepReport, split_times
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch, Layout
from worlds import run_world

SPLIT = ([5, 3, 1], [13, 9, 4], [31, 30, 0])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(save_tiny(config("llama"), tmp_path_factory.mktemp("model")))


def part_of(checkpoint: Checkpoint, rank: int, *, lora: bool = True, counts: tuple[list[int], ...] = SPLIT) -> Part:
    cfg = config("llama")
    part = build_part(
        checkpoint,
        decoder_of(cfg),
        shares(cfg, *counts),
        rank,
        compute=torch.float64,
        adapter=Lora(rank=4) if lora else None,
        seed=0,
    )
    if lora:
        for i, t in enumerate(part.chain.trained):
            whole = torch.randn(t.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64) * 0.3
            index = torch.tensor(list(t.held[rank]) if t.held else [], dtype=torch.long)
            t.local.detach().copy_(whole if t.dim is None else whole.index_select(t.dim, index))
    return part


@pytest.mark.parametrize(
    ("schedule", "warmup", "factors"),
    [
        ("constant", 0.0, [1, 1, 1, 1]),
        ("linear", 0.0, [1, 0.75, 0.5, 0.25]),
        ("cosine", 0.0, [1, 0.5 + 0.25 * 2**0.5, 0.5, 0.5 - 0.25 * 2**0.5]),
        ("constant", 0.5, [0.5, 1, 1, 1]),
        ("linear", 0.5, [0.5, 1, 1, 0.5]),
        ("cosine", 0.3, [0.5, 1, 1, 0.5]),  # 1.2 steps of warmup are two
        ("linear", 0.99, [0.25, 0.5, 0.75, 1]),
    ],
)
def test_schedules(schedule: str, warmup: float, factors: list[float]) -> None:
    plan = Settings(steps=4, learning_rate=1.0, schedule=schedule, warmup=warmup)
    assert [scheduled(plan, step) for step in range(4)] == pytest.approx(factors)


@given(st.integers(1, 500), st.floats(0, 1, exclude_max=True), st.sampled_from(["constant", "linear", "cosine"]))
def test_a_rate_rises_then_never_rises_again_and_no_step_is_lost(steps: int, warmup: float, schedule: str) -> None:
    plan = Settings(steps=steps, learning_rate=1.0, schedule=schedule, warmup=warmup)
    factors = [scheduled(plan, step) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)


def test_times_of_the_late_and_of_those_who_wait() -> None:
    # Device 1 comes 3 s late to the first message and device 0 1 s late to the second; messages take 0.5 s and 0.25 s.
    step_W, blocked_WN = torch.tensor([10.0, 10.0]), torch.tensor([[3.5, 0.25], [0.5, 1.25]])
    first, second = split_times(step_W, torch.zeros(2), blocked_WN)
    assert (first.compute_s, first.wait_s, first.transfer_s) == pytest.approx((6.25, 3.0, 0.75))
    assert (second.compute_s, second.wait_s, second.transfer_s) == pytest.approx((8.25, 1.0, 0.75))


def test_who_is_blocked_by_another_device_alone_waits_for_it() -> None:
    first, second = split_times(torch.tensor([10.0, 10.0]), torch.tensor([2.0, 0.0]), torch.tensor([[0.5], [3.5]]))
    assert (first.compute_s, first.wait_s, first.transfer_s) == pytest.approx((7.5, 2.0, 0.5))
    assert (second.compute_s, second.wait_s, second.transfer_s) == pytest.approx((6.5, 3.0, 0.5))


@given(
    st.integers(1, 4).flatmap(
        lambda W: st.integers(0, 5).flatmap(
            lambda N: st.lists(st.lists(st.floats(0, 1), min_size=N, max_size=N), min_size=W, max_size=W)
        )
    )
)
def test_times_add_up_and_none_is_negative(blocked: list[list[float]]) -> None:
    W = len(blocked)
    awaited_W = torch.arange(W, dtype=torch.float64)
    times = split_times(torch.full((W,), 10.0), awaited_W, torch.tensor(blocked, dtype=torch.float64))
    for device in times:
        assert device.compute_s + device.wait_s + device.transfer_s == pytest.approx(10.0)
        assert device.wait_s > -1e-9
        assert device.transfer_s >= 0
    assert len({device.transfer_s for device in times}) == 1


def gradients(checkpoint: Checkpoint, batches: Sequence[Batch], half_batches: int) -> list[list[Tensor]]:
    def body(comm: Comm) -> list[Tensor]:
        part = part_of(checkpoint, comm.rank)
        stepper = Stepper(part, comm, Settings(steps=1, learning_rate=0.1, half_batches=half_batches))
        found = stepper.accumulate([Turn(OWNER, batches if comm.rank == OWNER else None)])
        local = [t.local.grad for t in part.chain.trained]
        told = torch.tensor([found.loss, found.norm, found.tokens, found.target_tokens], dtype=torch.float64)
        return [told, *(gradient for gradient in local if gradient is not None)]

    return run_world(3, body)


def rows_of(whole: Batch, rows: range) -> Batch:
    """Some rows of a batch, padded no further than they need."""
    counts = [len(positions) for positions in whole.layout.positions]
    lengths = tuple(whole.layout.lengths[row] for row in rows)
    layout = Layout(lengths, tuple(whole.layout.positions[row] for row in rows))
    targets = whole.targets_N[sum(counts[: rows.start]) : sum(counts[: rows.stop])]
    return Batch(whole.ids_BS[rows.start : rows.stop, : max(lengths)], targets, layout)


@pytest.mark.parametrize("half_batches", [1, 2])
def test_sixteen_rows_at_once_are_eight_and_eight(checkpoint: Checkpoint, half_batches: int) -> None:
    whole = batch([2, 3, 3, 4, 5, 5, 6, 7, 9, 9, 10, 11, 12, 13, 14, 16], 5)
    eights = [rows_of(whole, range(8)), rows_of(whole, range(8, 16))]
    assert eights[0].targets_N.numel() != eights[1].targets_N.numel(), "equal counts would hide a mean of means"
    once = gradients(checkpoint, [whole], half_batches)
    twice = gradients(checkpoint, eights, half_batches)
    for one, two in zip(once, twice, strict=True):
        for a, b in zip(one, two, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)
            assert a.numel() == 0 or a.abs().max() > 0


@pytest.mark.timing
def test_a_report_says_what_was_done(checkpoint: Checkpoint) -> None:
    steps = three_steps()
    settings = Settings(steps=4, learning_rate=0.1, schedule="linear", clip=1.0)

    def body(comm: Comm) -> list[StepReport]:
        stepper = Stepper(part_of(checkpoint, comm.rank), comm, settings)
        comm.all_reduce(torch.ones(1)).wait()  # all begin together, so that steps are equally long
        return [stepper.step([Turn(OWNER, batches if comm.rank == OWNER else None)]) for batches in steps]

    worlds = run_world(3, body)
    for s, reports in enumerate(zip(*worlds, strict=True)):
        assert len({(r.loss, r.gradient_norm, r.tokens, r.target_tokens, r.learning_rate) for r in reports}) == 1
        assert len({r.devices for r in reports}) == 1
        report = reports[0]
        assert report.tokens == sum(sum(each.layout.lengths) for each in steps[s])
        assert report.target_tokens == sum(each.targets_N.numel() for each in steps[s])
        assert report.learning_rate == pytest.approx(0.1 * (1 - s / 4))
        assert len(report.devices) == 3
        for r in reports:
            assert r.bytes_sent > 0
        for device in report.devices:
            assert device.compute_s > 0
            whole = device.compute_s + device.wait_s + device.transfer_s
            assert whole == pytest.approx(report.step_s, rel=0.5, abs=0.05)


def test_weight_decay_spares_norms_and_biases(checkpoint: Checkpoint) -> None:
    part = part_of(checkpoint, 0, lora=False, counts=([9], [26], [61]))
    before = {t.name: t.local.detach().clone() for t in part.chain.trained}
    stepper = Stepper(part, Comm(), Settings(steps=1, learning_rate=0.1, weight_decay=0.5))
    for t in part.chain.trained:
        t.local.grad = torch.zeros_like(t.local)
    stepper.update(0.0, 0.1)
    for t in part.chain.trained:
        kept = 1 - 0.1 * 0.5 if t.local.ndim > 1 else 1.0
        assert torch.allclose(t.local, before[t.name] * kept, rtol=1e-12), t.name


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_clipping_acts_on_the_norm_of_the_whole_model(checkpoint: Checkpoint, factor: float) -> None:
    batches = three_steps()[0]

    def body(comm: Comm) -> float:
        part = part_of(checkpoint, comm.rank)
        own = batches if comm.rank == OWNER else None
        found = Stepper(part, comm, Settings(steps=1, learning_rate=0.1)).accumulate([Turn(OWNER, own)])
        stepper = Stepper(part, comm, Settings(steps=1, learning_rate=0.1, clip=factor * found.norm))
        assert stepper.optimizer is not None
        used = stepper.optimizer.gradients()
        before = [gradient.clone() for gradient in used]
        stepper.update(found.norm, 0.1)
        assert len(used) == len(before) > 0
        for whole, clipped in zip(before, used, strict=True):
            assert torch.allclose(clipped, whole * min(1.0, factor), rtol=1e-5)
        return found.norm

    norms = run_world(3, body)
    expected = math.sqrt(sum(float(g.pow(2).sum()) for g in alone(checkpoint, batches)))
    assert norms == pytest.approx([expected] * 3, rel=1e-9)


def alone(checkpoint: Checkpoint, batches: Sequence[Batch]) -> list[Tensor]:
    part = part_of(checkpoint, 0, counts=([9], [26], [61]))
    Stepper(part, Comm(), Settings(steps=1, learning_rate=0.1)).accumulate([Turn(OWNER, batches)])
    return [t.local.grad for t in part.chain.trained if t.local.grad is not None]


def test_waits_before_a_step_are_not_its_own(checkpoint: Checkpoint) -> None:
    def body(comm: Comm) -> StepReport:
        part = part_of(checkpoint, comm.rank)
        if comm.rank == OWNER:
            time.sleep(0.6)
        comm.broadcast(torch.ones(1), OWNER).wait()
        return Stepper(part, comm, Settings(steps=1, learning_rate=0.1)).step(
            [Turn(OWNER, three_steps()[0] if comm.rank == OWNER else None)]
        )

    for report in run_world(3, body):
        assert all(device.compute_s > 0 and device.wait_s < report.step_s for device in report.devices)


def poisoned(part: Part, value: float) -> Part:
    """An owner whose embedding gives numbers no model can live with."""

    def rows(ids: list[int]) -> Tensor:
        return torch.full((len(ids), part.hidden_size), value, dtype=torch.float64)

    return replace(part, embedding=Embedding(rows, 1.0))


def with_loss(part: Part, value: float) -> Part:
    return replace(part, target_rows=lambda ids: torch.full((len(ids), part.hidden_size), value, dtype=torch.float64))


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("poison", [poisoned, with_loss])
def test_a_loss_that_is_no_number_stops_every_device_before_the_update(
    checkpoint: Checkpoint, poison: Callable[[Part, float], Part], value: float
) -> None:
    steps = three_steps()

    def body(comm: Comm) -> str:
        part = part_of(checkpoint, comm.rank)
        stepper = Stepper(part, comm, Settings(steps=3, learning_rate=0.1))
        stepper.step([Turn(OWNER, steps[0] if comm.rank == OWNER else None)])
        stepper.strategy.part = poison(part, value) if comm.rank == OWNER else part
        before = [t.local.detach().clone() for t in part.chain.trained]
        with pytest.raises(PotluckError, match=r"of step 2 is not a finite number; the weights were left") as caught:
            stepper.step([Turn(OWNER, steps[1] if comm.rank == OWNER else None)])
        assert all(torch.equal(t.local, kept) for t, kept in zip(part.chain.trained, before, strict=True))
        assert stepper.done == 1
        return str(caught.value)

    assert len(set(run_world(3, body))) == 1


def test_a_micro_batch_without_targets_changes_nothing(checkpoint: Checkpoint) -> None:
    first = batch((9, 7, 5), 1)
    silent = Batch(first.ids_BS, torch.zeros(0, dtype=torch.long), Layout(first.layout.lengths, ((), (), ())))
    alone, beside = gradients(checkpoint, [first], 2), gradients(checkpoint, [first, silent], 2)
    for one, two in zip(alone, beside, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one[1:], two[1:], strict=True))


def test_the_lowest_trained_piece_ends_the_backward_walk(checkpoint: Checkpoint) -> None:
    """Training one linear of the last block sends one message forward a link and none backward below it."""
    cfg = config("llama")
    heard: list[list[str]] = [[], []]

    def body(targets: list[str], comm: Comm) -> None:
        plan = shares(cfg, [5, 4], [13, 13], [31, 30])
        lora = Lora(rank=2, targets=targets)
        part = build_part(checkpoint, decoder_of(cfg), plan, comm.rank, compute=torch.float64, adapter=lora, seed=0)
        stepper = Stepper(part, comm, Settings(steps=1, learning_rate=0.1, half_batches=1))
        heard[comm.rank].clear()
        stepper.accumulate([Turn(OWNER, [batch((9, 7), 1)] if comm.rank == OWNER else None)])

    def reduces(targets: list[str]) -> int:
        run_world(2, partial(body, targets), listener=lambda rank: lambda kind, content: heard[rank].append(kind))
        return heard[1].count("all_reduce")

    # Forward four links, the loss's gradient, partial gradients, the norm: seven. Then the links above the lowest.
    assert reduces(["layers.1.mlp.down_proj"]) == 7
    assert reduces(["layers.1.self_attn.q_proj"]) == 7 + 1
    assert reduces(["layers.0.mlp.up_proj"]) == 7 + 2
    assert reduces(["layers.0.self_attn.v_proj"]) == 7 + 3
