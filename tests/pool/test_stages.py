"""Stages of a pipeline: the best of all there are, whatever fits, and what is said where nothing does."""

from collections.abc import Iterator
from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from pool.profiles import MIB, SMOLLM2, job, profile, work
from potluck.errors import BadInput
from potluck.models.families import with_frozen
from potluck.models.families.decoder import Decoder
from potluck.models.families.llama import llama
from potluck.pool.profile import Link, Profile
from potluck.pool.stage_costs import Stage, StageCosts, predict_stages
from potluck.pool.stage_profiles import stage_costs
from potluck.pool.stages import best_stages, even_stages, micro_batch_sizes

QUICK = Link(latency_s=2e-5, bytes_per_s=2e9)


def decoder(**differs: Any) -> Decoder:
    return llama(LlamaConfig(**{n: v for n, v in (SMOLLM2 | differs).items() if n != "model_type"}))


def random_pool(random: np.random.Generator, count: int, tight: bool) -> list[Profile]:
    rate, latency = 10 ** random.uniform(6, 9.5), 10 ** random.uniform(-5, -2)
    return [
        profile(
            f"d{i}",
            speed=10 ** random.uniform(-0.5, 0.5),
            available=int(random.uniform(620, 800) * MIB) if tight else 64 << 30,
            link=Link(
                latency_s=latency * random.uniform(1, 2),
                bytes_per_s=rate * random.uniform(1, 2),
                covered_s=random.uniform(0, 2e-3),
                covered_bytes=300_000,
            ),
            forward_part=random.uniform(0.25, 0.45),
        )
        for i in range(count)
    ]


def all_stages(costs: StageCosts, most: int, needed: set[int]) -> Iterator[list[Stage]]:
    for size in range(2, min(most, len(costs.rows)) + 1):
        for order in permutations(range(len(costs.names)), size):
            for cuts in combinations(range(1, costs.links), size - 1):
                if needed <= set(order):
                    yield [Stage(d, a, b) for d, a, b in zip(order, (0, *cuts), (*cuts, costs.links), strict=True)]


@pytest.mark.parametrize(
    ("seed", "frozen"), [*((seed, 0) for seed in range(40)), *((seed, 1 + seed % 2) for seed in range(40, 64))]
)
def test_best_stages_are_the_best_of_all(seed: int, frozen: int) -> None:
    random = np.random.default_rng(seed)
    model = with_frozen(decoder(num_hidden_layers=3), frozen)
    pool = random_pool(random, 2 + seed % 2, tight=seed % 4 > 1)
    owners = [p.device for p in pool[1:] if random.random() < 0.2]
    the_job = job(batch_size=int(random.integers(4, 8)), train="full" if seed % 5 == 0 else "lora")
    measured = work(train=the_job.train)
    needed = {i for i, p in enumerate(pool) if i == 0 or p.device in owners}
    steps = [
        predicted.step_s
        for rows in micro_batch_sizes(the_job, measured, len(needed))
        for costs in [stage_costs(the_job, model, measured, pool, owners, rows)]
        for stages in all_stages(costs, 3, needed)
        for predicted in [predict_stages(costs, stages)]
        if all(d.memory_bytes <= d.available_bytes for d in predicted.devices)
    ]
    found = best_stages(the_job, model, measured, pool, owners)
    if not steps:
        assert any(d.memory_bytes > d.available_bytes for d in found.prediction.devices)
        return
    assert found.proven
    assert found.prediction.step_s == pytest.approx(min(steps), rel=2e-4)


@pytest.mark.parametrize("seed", range(12))
def test_where_nothing_fits_the_least_is_missing(seed: int) -> None:
    random = np.random.default_rng(100 + seed)
    pool = [
        p.model_copy(update={"available_bytes": int(random.uniform(300, 600) * MIB)})
        for p in random_pool(random, 3, tight=True)
    ]
    the_job, model = job(batch_size=4, micro_batch_size=1), decoder(num_hidden_layers=2)
    found = best_stages(the_job, model, work(), pool)
    least = min(
        max(d.memory_bytes - d.available_bytes for d in predict_stages(found.costs, stages).devices)
        for stages in all_stages(found.costs, 3, {0})
    )
    assert least > 0
    assert max(d.memory_bytes - d.available_bytes for d in found.prediction.devices) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(6))
def test_no_other_stages_of_a_long_chain_are_faster(seed: int) -> None:
    random = np.random.default_rng(seed)
    pool = random_pool(random, 4, tight=bool(seed % 2))
    found = best_stages(job(batch_size=8), decoder(), work(rows=4, supervised=512), pool)
    costs = [stage_costs(job(batch_size=8), decoder(), work(rows=4, supervised=512), pool, (), r) for r in (1, 2, 4)]
    assert all(d.memory_bytes <= d.available_bytes for d in found.prediction.devices) or seed % 2
    for _ in range(300):
        each = costs[random.integers(0, 3)]
        order = random.permutation(4)[: random.integers(2, min(4, len(each.rows)) + 1)].tolist()
        cuts = sorted(random.choice(np.arange(1, 60), len(order) - 1, replace=False).tolist())
        stages = [Stage(d, a, b) for d, a, b in zip(order, [0, *cuts], [*cuts, 60], strict=True)]
        if 0 in order:
            other = predict_stages(each, stages)
            if all(d.memory_bytes <= d.available_bytes for d in other.devices):
                assert found.prediction.step_s <= other.step_s * (1 + 2e-4)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_stages_of_frozen_blocks(train: str) -> None:
    pool = [profile("hub", link=QUICK), profile("cam", speed=0.5, link=QUICK)]
    whole, measured = decoder(), work(train=train)
    before, some, most = (
        stage_costs(job(train=train, frozen_blocks=n), with_frozen(whole, n), measured, pool, [], 1)
        for n in (0, 10, 29)
    )
    below, over, across = Stage(0, 0, 20), Stage(0, 20, 60), Stage(0, 18, 24)
    (forward, _), (frozen_forward, backward) = before.walk_s(below), some.walk_s(below)
    assert (frozen_forward, backward) == (pytest.approx(forward), 0.0)
    assert some.walk_s(over) == pytest.approx(before.walk_s(over))
    assert some.walk_s(across)[1] == pytest.approx(before.walk_s(Stage(0, 20, 24))[1])
    for costs in (before, some, most):
        for stage in (below, over, across):
            assert sum(costs.walk_s(stage)) == pytest.approx(costs.walks_s(0)[stage.start, stage.stop])
    assert some.trained_N1[20] == 0.0
    # without adapters, 4 bytes an element instead of 16; with them, 4 bytes an element either way
    held = before.weights_N1[20] / 4 if train == "full" else before.weights_N1[20] - 16 * before.trained_N1[20]
    assert some.weights_N1[20] == pytest.approx(held, rel=1e-3)
    assert some.memory(below, 3) < before.memory(below, 3) - 2 * (before.graphs_DN1[0, 20])
    lengths = [predict_stages(costs, [Stage(1, 0, 20), Stage(0, 20, 60)]).step_s for costs in (before, some, most)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[2] < 0.7 * lengths[0]


def test_what_a_stage_costs_by_hand() -> None:
    link = Link(latency_s=0.001, bytes_per_s=1e8, world_size=2, covered_s=0.002, covered_bytes=1_000_000)
    pool = [profile("hub", link=link), profile("cam", speed=0.5, link=link)]
    costs = stage_costs(job(batch_size=5), decoder(), work(), pool, ["cam"], 1)
    assert costs.rows == (1,) * 6  # three rows of each owner
    attention, mlp = (0.0012 + 9 * 0.0011) / 2, (0.0010 + 1536 * 0.0000115) / 2  # measured at two rows
    head = (0.0008 + 49152 * 0.0000021) / 2
    message_bytes = 1 * 128 * 576 * 4
    handled = message_bytes * 0.002 / 1_000_000 / 2
    forward, backward = costs.walk_s(Stage(0, 0, 3))
    assert forward == pytest.approx(0.35 * (2 * attention + mlp) + handled)
    assert backward == pytest.approx(0.65 * (2 * attention + mlp) + handled)
    assert sum(costs.walk_s(Stage(1, 3, 60))) == pytest.approx(2 * (28 * attention + 29 * mlp + head) + 2 * handled)
    assert costs.walks_s(1)[3, 60] == pytest.approx(sum(costs.walk_s(Stage(1, 3, 60))))
    assert costs.walks_s(0)[2, 7] == pytest.approx(sum(costs.walk_s(Stage(0, 2, 7))))
    assert costs.message_s(0, 1) == pytest.approx(0.001 + message_bytes / 1e8)
    both_ways = 6 * message_bytes
    assert costs.bytes_sent(Stage(0, 0, 3)) == pytest.approx(both_ways + 3 * 8 * 128)  # and labels
    assert costs.bytes_sent(Stage(1, 3, 60)) == pytest.approx(both_ways + 3 * 8 * 128)  # and ids


def test_the_last_mlp_walks_supervised_positions_only() -> None:
    costs = stage_costs(job(), decoder(), work(supervised=64), [profile("hub"), profile("cam")], (), 2)
    before, last = (costs.seconds_DN1[0, i + 1] - costs.seconds_DN1[0, i] for i in (57, 59))
    assert last == pytest.approx(before / 4)


def test_earlier_stages_hold_more_micro_batches() -> None:
    for checkpointing in (False, True):
        measured = work(checkpointing=checkpointing)
        costs = stage_costs(job(checkpointing=checkpointing), decoder(), measured, [profile("a"), profile("b")], (), 1)
        one, two, three = (costs.memory(Stage(0, 0, 20), in_flight) for in_flight in (1, 2, 3))
        assert one < two < three
        assert three - two == pytest.approx(two - one)
        kept = 20 * costs.task.kept_bytes / 2 if checkpointing else costs.graphs_DN1[0, 20]
        leaving = 2 * costs.task.message_bytes * costs.task.longest_part  # a stream and a gradient for a neighbour
        assert two - one == pytest.approx(kept + leaving)
    full, lora = (
        stage_costs(job(train=train), decoder(), work(train=train), [profile("a"), profile("b")], (), 1)
        for train in ("full", "lora")
    )
    # a frozen weight against a value, a gradient and two moments
    assert full.weights_N1[20] > 3 * lora.weights_N1[20]
    assert full.memory(Stage(0, 0, 20), 1) - full.weights_N1[20] == pytest.approx(
        lora.memory(Stage(0, 0, 20), 1) - lora.weights_N1[20]
    )


def test_an_incomplete_micro_batch_takes_its_part() -> None:
    pool = [profile("hub", link=QUICK), profile("cam", link=QUICK)]
    five = stage_costs(job(batch_size=5, micro_batch_size=2), decoder(), work(), pool, (), 2)
    assert (five.rows, five.parts) == ((2, 2, 1), [1.0, 1.0, 0.5])
    stages = [Stage(0, 0, 30), Stage(1, 30, 60)]
    run = five.simulated(stages)
    assert run.busy_s[0] == pytest.approx(2.5 * sum(five.walk_s(stages[0])))


def test_even_stages_in_the_order_of_ranks() -> None:
    pool = [profile("slow", speed=0.5), profile("fast", speed=2), profile("mid"), profile("slowest", speed=0.4)]
    found = even_stages(job(batch_size=8, micro_batch_size=2), decoder(num_hidden_layers=9), work(), pool)
    assert [(s.device, s.stop - s.start) for s in found.stages] == [(0, 4), (1, 5), (2, 5), (3, 4)]
    assert found.micro_batch_size == 2


def test_all_devices_take_part_if_asked() -> None:
    slow = Link(latency_s=0.05, bytes_per_s=1e7)
    pool = [profile("hub", link=slow), profile("cam", link=slow), profile("old", speed=0.01, link=slow)]
    assert len(best_stages(job(batch_size=8), decoder(), work(), pool).stages) == 2
    found = best_stages(job(batch_size=8), decoder(), work(), pool, at_least=3)
    assert len(found.stages) == 3
    assert min(stage.stop - stage.start for stage in found.stages) == 1


def test_many_devices_are_planned_too() -> None:
    pool = random_pool(np.random.default_rng(0), 9, tight=False)
    found = best_stages(job(batch_size=16), decoder(), work(rows=8, supervised=1024), pool, ["d7"])
    assert {0, 7} <= {stage.device for stage in found.stages}
    assert not found.proven
    alone_s = sum(costs for costs in found.costs.walk_s(Stage(0, 0, 60))) * 16 / found.micro_batch_size
    assert found.prediction.step_s < alone_s


@pytest.mark.parametrize(
    ("fields", "owners", "sizes"),
    [
        ({"batch_size": 8}, 1, [4, 2, 1]),  # two rows of a half-batch were measured, so there are no more examples
        ({"batch_size": 8}, 2, [4, 2, 1]),
        ({"batch_size": 8, "micro_batch_size": 3}, 1, [3]),
        ({"batch_size": 2, "micro_batch_size": 2}, 2, [1]),
    ],
)
def test_sizes_of_micro_batches(fields: dict[str, Any], owners: int, sizes: list[int]) -> None:
    assert micro_batch_sizes(job(**fields), work(), owners) == sizes


@pytest.mark.parametrize(
    ("fields", "layers", "sentence"),
    [
        ({"batch_size": 2}, 30, "3 stages of a pipeline need at least 3 micro-batches a step, and a step has 2 micro-"),
        (
            {"micro_batch_size": 4},
            30,
            "3 stages .* has 1 micro-batch of 4 rows: raise batch_size, or lower micro_batch",
        ),
        ({"batch_size": 8}, 1, "3 stages need a link each, and the model has 2: use fewer devices"),
    ],
)
def test_pipelines_that_cannot_be(fields: dict[str, Any], layers: int, sentence: str) -> None:
    pool = [profile(f"d{i}") for i in range(3)]
    with pytest.raises(BadInput, match=sentence):
        even_stages(job(**fields), decoder(num_hidden_layers=layers), work(), pool)
    with pytest.raises(BadInput, match=sentence):
        best_stages(job(**fields), decoder(num_hidden_layers=layers), work(), pool, at_least=3)
