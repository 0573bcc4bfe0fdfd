"""Rows dealt to devices train exactly as one device that walks them all, in float64; ids go where they are walked."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from pool.leaks import leaks, secrets
from pool.parity_models import CLIP, LEARNING_RATE, WEIGHTS_WITHIN, Models, Steps, far, turns_of
from pool.profiles import job, profile, work
from pool.tiny import VOCAB, batch, config, shares, three_steps
from potluck.chain.comm import Comm
from potluck.job_sections import Lora
from potluck.models.build import Part, build_part
from potluck.models.families import decoder_of
from potluck.pool.dealing import deal_rows
from potluck.pool.gradients import unequal
from potluck.pool.micro_batch import MicroBatch
from potluck.pool.reduce import spread_from_homes
from potluck.pool.rows import predict_data
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.data import DataParallel
from potluck.pool.task import task_of
from potluck.texts.batch import Batch, Layout
from worlds import run_world

SETTINGS = Settings(steps=3, learning_rate=LEARNING_RATE, schedule="constant", clip=CLIP)


def silenced(whole: Batch, row: int) -> Batch:
    """The batch with no target in one row."""
    counts = [len(positions) for positions in whole.layout.positions]
    first = sum(counts[:row])
    positions = [() if r == row else each for r, each in enumerate(whole.layout.positions)]
    targets = torch.cat((whole.targets_N[:first], whole.targets_N[first + counts[row] :]))
    return Batch(whole.ids_BS, targets, Layout(whole.layout.lengths, tuple(positions)))


STEPS: dict[str, Callable[[], Steps]] = {
    "uneven rows": three_steps,
    "one row, or a row without a target": lambda: [
        [batch((9,), 1)],
        [silenced(batch((9, 7, 5, 4), 2), 1), silenced(batch((6,), 3), 0)],
        [batch((3, 8), 4)],
    ],
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), STEPS)


def part_of(models: Models, family: str, *, tied: bool = True, lora: Lora | None = None) -> Part:
    cfg = config(family, tie_word_embeddings=tied)
    whole = shares(cfg, [cfg.num_attention_heads], [cfg.intermediate_size], [VOCAB])
    checkpoint = models.checkpoint(family, tied)
    return build_part(checkpoint, decoder_of(cfg), whole, 0, compute=torch.float64, adapter=lora, seed=0)


def check_parity(
    models: Models,
    speeds: Sequence[float] | None,
    world_size: int,
    *,
    family: str = "llama",
    tied: bool = True,
    lora: bool = True,
    steps: str = "uneven rows",
    micro_batch_size: int | None = None,
    checkpointing: bool = False,
    owners: Sequence[int] = (0,),
) -> None:
    plain = models.plain(family, tied, ("all-linear",) if lora else None, steps)
    norm = math.sqrt(sum(float(g.square().sum()) for g in plain.gradients.values()))

    def body(comm: Comm) -> list[str]:
        part = part_of(models, family, tied=tied, lora=Lora(rank=4, alpha=8) if lora else None)
        for t in part.chain.trained:
            t.local.detach().copy_(plain.initial[t.name])
        strategy = DataParallel(
            part,
            comm,
            speeds=speeds,
            micro_batch_size=micro_batch_size,
            checkpointing=checkpointing,
            seed=0,
        )
        stepper = Stepper(part, comm, SETTINGS, strategy)
        for step, batches in enumerate(STEPS[steps]()):
            found = stepper.accumulate(turns_of(batches, owners, comm.rank))
            assert abs(found.loss - plain.losses[step]) < 1e-9
            if step == 0:
                assert found.norm == pytest.approx(norm, rel=1e-9)
                for h in strategy.held:
                    gradient, whole = h.trained.local.grad, plain.gradients[h.trained.name]
                    assert (gradient is None) == (h.home != comm.rank)
                    assert gradient is None or far(gradient, whole) < 1e-9, h.trained.name
            stepper.update(found.norm, LEARNING_RATE)
        for t in part.chain.trained:
            assert far(t.local.detach(), plain.weights[t.name]) < WEIGHTS_WITHIN, t.name
        assert list(unequal(strategy.held, comm)) == []
        gathered = dict(strategy.whole())
        if comm.rank == 0:
            assert set(gathered) == set(plain.weights)
            assert all(far(tensor, plain.weights[name]) < WEIGHTS_WITHIN for name, tensor in gathered.items())
        return [h.trained.name for h in strategy.held if h.home == comm.rank]

    homes = [body(Comm())] if world_size == 1 else run_world(world_size, body)
    assert sorted(name for of_rank in homes for name in of_rank) == sorted(plain.initial)


WORLDS: dict[str, list[float]] = {
    "1": [1.0],
    "2: 1.42/1": [1.42, 1.0],
    "3: 1/2/1": [1.0, 2.0, 1.0],
    "3: coordinator without rows": [0.01, 2.0, 1.0],
    "4: 4/2/1/1": [4.0, 2.0, 1.0, 1.0],
}


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("world", WORLDS)
def test_rows_dealt_by_speed(models: Models, world: str, lora: bool, steps: str) -> None:
    check_parity(models, WORLDS[world], len(WORLDS[world]), lora=lora, steps=steps)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", ["llama-biased", "gemma3", "qwen3", "gpt2", "gpt_neox", "olmo2", "opt", "phi3"])
def test_families(models: Models, family: str, lora: bool, tied: bool, checkpointing: bool) -> None:
    check_parity(models, [2.0, 1.0], 2, family=family, tied=tied, lora=lora, checkpointing=checkpointing)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_few_rows_at_once(models: Models, size: int) -> None:
    check_parity(models, [3.0, 1.0], 2, micro_batch_size=size)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize(("world_size", "owners"), [(2, (0, 1)), (2, (1, 0)), (3, (0, 2))], ids=str)
def test_owners_walk_their_own_rows(models: Models, world_size: int, owners: tuple[int, ...], lora: bool) -> None:
    check_parity(models, None, world_size, lora=lora, owners=owners)


@pytest.mark.parametrize("owners", [(1,), (0, 2), (2, 1)], ids=str)
def test_rows_of_any_owner_are_dealt(models: Models, owners: tuple[int, ...]) -> None:
    check_parity(models, [1.0, 2.0, 1.0], 3, owners=owners, micro_batch_size=2)


def heard_in_three_steps(
    models: Models, speeds: Sequence[float] | None, owners: Sequence[int], steps: Steps
) -> list[list[tuple[str, Tensor]]]:
    """What each of three ranks sends."""
    heard: list[list[tuple[str, Tensor]]] = [[], [], []]

    def body(comm: Comm) -> None:
        part = part_of(models, "llama", lora=Lora(rank=4))
        strategy = DataParallel(part, comm, speeds=speeds, micro_batch_size=2, checkpointing=False, seed=0)
        stepper = Stepper(part, comm, SETTINGS, strategy)
        for batches in steps:
            stepper.step(turns_of(batches, owners, comm.rank))

    run_world(3, body, listener=lambda rank: lambda kind, content: heard[rank].append((kind, content.clone())))
    return heard


def private_steps() -> Steps:
    return [[batch((14, 11, 10), 10 * s), batch((12, 9), 10 * s + 1)] for s in range(3)]


def test_rows_that_stay_are_in_no_message(models: Models) -> None:
    steps = private_steps()
    heard = heard_in_three_steps(models, None, (0, 2), steps)
    known = secrets([each for batches in steps for each in batches])
    messages = [message for rank in heard for message in rank]
    layouts = [message for message in messages if not message[1].is_floating_point()]
    assert {kind for kind, _ in layouts} == {"broadcast"}
    assert len(layouts) == 3 * 2 * 2, "a length and a content for each owner's turn"
    assert not any(not content.is_floating_point() for _, content in heard[1])
    floats = [content for _, content in messages if content.is_floating_point()]
    assert sum(content.numel() for content in floats) > 1000
    assert not any(leaks(content, known, VOCAB) for content in floats)


def test_rows_go_to_who_walks_them_and_to_nobody_else(models: Models) -> None:
    steps, speeds = private_steps(), [1.0, 2.0, 1.0]
    heard = heard_in_three_steps(models, speeds, (1,), steps)
    sent = [[content for kind, content in rank if kind == "send" and not content.is_floating_point()] for rank in heard]
    assert sent[0] == sent[2] == []
    expected = []
    for batches in steps:
        rows = [
            (each.ids_BS[row, :length], each.targets_N[sum(map(len, each.layout.positions[:row])) :][: len(positions)])
            for each in batches
            for row, (length, positions) in enumerate(zip(each.layout.lengths, each.layout.positions, strict=True))
            if positions
        ]
        dealt = deal_rows([ids.numel() for ids, _ in rows], speeds)
        expected += [torch.cat([part for i in dealt[other] for part in rows[i]]) for other in (0, 2) if dealt[other]]
    assert len(sent[1]) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(sent[1], expected, strict=True))


def test_bytes_are_those_that_were_predicted(models: Models) -> None:
    cfg, speeds = config("llama"), [2.0, 1.0, 1.0]
    rows = batch((12,) * 8, 1)
    supervised = round(rows.targets_N.numel() / 4)
    at = work(config=cfg.to_dict(), rows=2, length=12, supervised=supervised, dtype="fp64", lora=Lora(rank=4))
    task = task_of(job(batch_size=8, dtype="fp64", lora=Lora(rank=4)), decoder_of(cfg), at)
    pool = [profile(name, of=at) for name in "abc"]

    def body(comm: Comm) -> int:
        part = part_of(models, "llama", lora=Lora(rank=4))
        strategy = DataParallel(part, comm, speeds=speeds, micro_batch_size=2, checkpointing=False, seed=0)
        stepper = Stepper(part, comm, SETTINGS, strategy)
        stepper.step(turns_of([rows], (0,), comm.rank))
        before = comm.clocks.bytes_sent
        stepper.strategy.walk([MicroBatch(0, rows.layout, rows if comm.rank == 0 else None)], 1, 1)
        spread_from_homes(strategy.held, comm)
        return comm.clocks.bytes_sent - before

    counted = run_world(3, body)
    said = predict_data(task, pool, [4, 2, 2], 2)
    for device, sent in zip(said.devices, counted, strict=True):
        assert device.bytes_sent == pytest.approx(sent, rel=0.05)


@pytest.mark.parametrize("speeds", [[1.0], [0.0, 0.0], [1.0, -1.0]], ids=str)
def test_speeds_must_be_possible(models: Models, speeds: list[float]) -> None:
    def body(comm: Comm) -> None:
        with pytest.raises(ValueError, match="2 devices need a speed each"):
            DataParallel(
                part_of(models, "llama"), comm, speeds=speeds, micro_batch_size=None, checkpointing=False, seed=0
            )

    run_world(2, body)


def test_what_is_dropped_differs_from_device_to_device(models: Models) -> None:
    one = batch((9,), 1)
    twins = Batch(
        one.ids_BS.expand(2, -1),
        one.targets_N.repeat(2),
        Layout(one.layout.lengths * 2, one.layout.positions * 2),
    )

    def losses(dropout: float) -> list[float]:
        def body(comm: Comm) -> float:
            part = part_of(models, "llama", lora=Lora(rank=4, dropout=dropout))
            for i, t in enumerate(part.chain.trained):
                t.local.detach().copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(i)))
            strategy = DataParallel(part, comm, speeds=[1.0, 1.0], micro_batch_size=None, checkpointing=False, seed=0)
            own = MicroBatch(0, twins.layout, twins if comm.rank == 0 else None)
            return float(strategy.walk([own], 0, twins.targets_N.numel()))

        return run_world(2, body)

    same, different = losses(0.0), losses(0.5)
    assert same[0] == same[1]
    assert different[0] != different[1]
    assert different == losses(0.5), "masks follow from the seed"
