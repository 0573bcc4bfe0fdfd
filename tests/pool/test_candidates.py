"""Plans of every strategy: what always holds of them, which is chosen, and what is said."""

import math
import re
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from pool.profiles import GIB, MIB, SMOLLM2, job, profile, work
from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.models.families.decoder import Decoder
from potluck.models.families.llama import llama
from potluck.pool.candidates import Candidate, best, if_data_moved, plans
from potluck.pool.cost import OWNER_BYTES, Prediction
from potluck.pool.plan import Plan
from potluck.pool.profile import Link, Profile

QUICK = Link(latency_s=2e-5, bytes_per_s=2e9)


def smollm2(**differs: Any) -> Decoder:
    return llama(LlamaConfig(**{n: v for n, v in (SMOLLM2 | differs).items() if n != "model_type"}))


def of(strategy: str, candidates: list[Candidate]) -> Candidate:
    (found,) = [c for c in candidates if c.strategy == strategy]
    return found


def random_pool(random: np.random.Generator, count: int, tight: bool) -> list[Profile]:
    rate, latency = 10 ** random.uniform(7, 9.5), 10 ** random.uniform(-5, -2.5)
    return [
        profile(
            f"d{i}",
            speed=10 ** random.uniform(-1, 0.5),
            available=int(random.uniform(600, 1700) * MIB) if tight else 64 * GIB,
            link=Link(latency_s=latency * random.uniform(1, 2), bytes_per_s=rate * random.uniform(1, 2)),
            forward_part=random.uniform(0.25, 0.45),
        )
        for i in range(count)
    ]


def test_what_holds_of_all_plans_on_a_thousand_random_profiles() -> None:
    random, decoder, measured = np.random.default_rng(0), smollm2(), 0
    totals = {"heads": 9, "columns": 1536, "vocab_rows": 49152}
    compared = {"tensor": 0, "pipeline": 0}
    while measured < 1000:
        pool = random_pool(random, int(random.integers(2, 7)), tight=bool(random.random() < 0.3))
        measured += len(pool)
        must = [p.device for p in pool[1:] if random.random() < 0.2]
        found = plans(job(half_batches=int(random.integers(1, 3))), decoder, work(), pool, must)
        for c in found:
            if c.plan is None or c.prediction is None:
                assert not c.feasible
                continue
            devices = c.plan.devices
            if c.strategy in ("pipeline", "pipeline-uniform"):
                links = sorted(device.links.spans for device in devices if device.links)
                assert len(links) == len(devices) >= 2
                assert [i for ((start, stop),) in links for i in range(start, stop)] == list(range(60))
                assert [len(d.vocab_rows) for d in devices if d.links and 59 in d.links] == [49152]
                assert sum(len(d.vocab_rows) for d in devices) == 49152
                assert c.plan.micro_batch_size is not None
                owners = 1 + len(must)
                assert owners * math.ceil(math.ceil(4 / owners) / c.plan.micro_batch_size) >= len(devices)
            for kind, total in totals.items():
                held = [getattr(device, kind) for device in devices]
                if c.strategy in ("single", "tensor", "tensor-uniform"):
                    assert [i for ranges in held for i in ranges] == list(range(total))
                elif c.strategy == "data" or kind != "vocab_rows":
                    assert all(ranges == Ranges.of(0, total) for ranges in held)
            assert [d.name for d in devices] == [p.device for p in pool if p.device in {d.name for d in devices}]
            assert [d.name for d in c.prediction.devices] == [d.name for d in devices]
            assert c.strategy == "single" or {pool[0].device, *must} <= {d.name for d in devices}
            assert not (c.feasible and c.moves_data), "data stay"
            over = [d for d in c.prediction.devices if d.memory_bytes > d.available_bytes]
            assert not (c.feasible and over)
            assert c.feasible or c.reason
        for better, worse in (("tensor", "tensor-uniform"), ("pipeline", "pipeline-uniform")):
            one, other = of(better, found).prediction, of(worse, found).prediction
            if one and other and fits(one) and fits(other):
                assert one.step_s <= other.step_s * (1 + 2e-4)
                compared[better] += 1
    assert compared["tensor"] > 100
    assert compared["pipeline"] > 50


def fits(prediction: Prediction) -> bool:
    return all(device.memory_bytes <= device.available_bytes for device in prediction.devices)


def test_even_shares_give_the_remainder_to_the_fastest() -> None:
    pool = [
        profile("slow", speed=0.5),
        profile("fast", speed=2),
        profile("mid", speed=1),
        profile("slowest", speed=0.4),
    ]
    plan = of("tensor-uniform", plans(job(), smollm2(), work(), pool)).plan
    assert plan is not None
    assert [len(device.heads) for device in plan.devices] == [2, 3, 2, 2]
    assert plan.devices[1].heads == Ranges.of(2, 5)
    assert [len(device.columns) for device in plan.devices] == [384] * 4


def test_a_quick_link_makes_several_faster_than_one_and_a_slow_one_does_not() -> None:
    for link, strategy in ((QUICK, "tensor"), (Link(latency_s=0.003, bytes_per_s=1e7), "single")):
        pool = [profile("hub", speed=1.9, link=link), profile("cam-1", link=link)]
        chosen = best(plans(job(), smollm2(), work(), pool))
        assert chosen.strategy == strategy
        assert chosen.plan is not None
        assert chosen.prediction is not None
        assert chosen.plan.predicted_step_s == chosen.prediction.step_s
        assert chosen.plan.why == chosen.reason
        assert Plan.from_json(chosen.plan.to_json()) == chosen.plan
        if strategy == "tensor":
            assert "hub computes 1.9x as fast as cam-1 and takes 6 of 9 query heads, cam-1 3." in chosen.reason
        else:
            assert "hub trains alone" in chosen.reason
            assert "cam-1 is left out: with it a step would take" in chosen.reason


def test_a_strategy_that_was_asked_for_is_chosen_or_refused() -> None:
    pool = [profile("hub", link=QUICK, available=1300 * MIB), profile("cam-1", link=QUICK)]
    found = plans(job(), smollm2(), work(), pool)
    assert best(found, "tensor-uniform").strategy == "tensor-uniform"
    with pytest.raises(BadInput, match=r"strategy: 'single' cannot be carried out: 0\.\d\d GiB are missing on hub"):
        best(found, "single")
    alone = plans(job(), smollm2(), work(), pool[1:])
    assert [c.strategy for c in alone if c.feasible] == ["single"]
    with pytest.raises(BadInput, match="strategy: 'tensor' cannot be carried out: there is one device only"):
        best(alone, "tensor")


def test_nothing_fits() -> None:
    pool = [profile("hub", available=700 * MIB), profile("cam-1", available=700 * MIB)]
    with pytest.raises(BadInput, match=r"No plan fits\. Alone: .*GiB are missing on hub.* Together: .*GiB are missing"):
        best(plans(job(), smollm2(), work(), pool))


def test_all_shares_to_one_device_says_train_there_alone() -> None:
    pool = [profile("hub", speed=8, link=QUICK), profile("old", speed=0.01, link=QUICK)]
    tensor = of("tensor", plans(job(), smollm2(), work(), pool))
    assert not tensor.feasible
    assert tensor.reason == "every share would go to hub: train there alone (strategy: single)."
    owned = of("tensor", plans(job(), smollm2(), work(), pool, must=["old"]))
    assert owned.feasible  # the data of old are there, and stay
    assert owned.reason.startswith("every share goes to hub: with the data there, it would better train alone.")


def test_data_that_stay_keep_their_owners_in() -> None:
    pool = [profile("hub", link=QUICK), profile("cam-1", link=QUICK), profile("old", speed=0.1, link=QUICK)]
    found = plans(job(), smollm2(), work(), pool, must=["old"])
    single = of("single", found)
    assert (single.feasible, single.reason) == (False, "the data of old would have to move to hub.")
    chosen = best(found)
    assert chosen.plan is not None
    assert "old" in [device.name for device in chosen.plan.devices]
    said = if_data_moved(job(), smollm2(), work(), pool, ["old"], chosen, found)
    assert said is not None
    assert said.startswith("If data could move, hub + cam-1 + old (strategy data) would take ")
    few = work(rows=1, supervised=128, longest=128)  # of one row there is nothing to deal
    alike = [profile("hub", link=QUICK, of=few), profile("cam-1", link=QUICK, of=few)]
    found = plans(job(batch_size=1), smollm2(), few, alike)
    assert if_data_moved(job(batch_size=1), smollm2(), few, alike, [], best(found), found) is None


def test_data_that_may_move_show_each_device_alone() -> None:
    slow = Link(latency_s=0.003, bytes_per_s=1e7)
    pool = [profile("old", speed=0.2, link=slow), profile("hub", link=slow)]
    found = plans(job(data_stays=False), smollm2(), work(), pool)
    singles = {c.plan.devices[0].name: c for c in found if c.strategy == "single" and c.plan}
    assert singles["old"].feasible
    assert not singles["hub"].feasible
    assert singles["hub"].reason == "hub is not where this run starts: move the data there and train there alone."
    stays = if_data_moved(job(), smollm2(), work(), pool, [], singles["old"], list(singles.values()))
    assert stays is not None
    assert stays.startswith("If data could move, hub alone would take ")


def test_a_device_without_memory_is_left_out_and_named() -> None:
    pool = [profile("hub", link=QUICK), profile("cam-1", link=QUICK, available=100 * MIB), profile("pi", link=QUICK)]
    chosen = best(plans(job(), smollm2(), work(), pool))
    assert chosen.plan is not None
    assert [device.name for device in chosen.plan.devices] == ["hub", "pi"]
    assert "cam-1 is left out for want of memory." in chosen.reason


SLOW = Link(latency_s=0.001, bytes_per_s=2e7)


def test_on_a_slow_link_a_pipeline_wins_where_data_may_move() -> None:
    measured = work(rows=4, supervised=512)
    speeds = {"hub": 1.42, "cam-1": 1.0, "cam-2": 1.0}
    pool = [profile(name, speed=speed, link=SLOW, of=measured) for name, speed in speeds.items()]
    found = plans(job(batch_size=8, data_stays=False), smollm2(), measured, pool)
    chosen = best(found)
    assert (chosen.strategy, chosen.moves_data, chosen.proven) == ("pipeline", True, True)
    assert chosen.plan is not None
    assert chosen.prediction is not None
    assert Plan.from_json(chosen.plan.to_json()) == chosen.plan
    assert "hub computes 1.4x as fast as cam-" in chosen.reason
    assert "in micro-batches of 1 row. Messages take " in chosen.reason
    sent = {c.strategy: max(d.bytes_sent for d in c.prediction.devices) for c in found if c.prediction}
    assert sent["pipeline"] < sent["tensor"] / 20

    stays = plans(job(batch_size=8), smollm2(), measured, pool)
    assert best(stays).strategy == "single"
    pipeline, uniform, data = (of(strategy, stays) for strategy in ("pipeline", "pipeline-uniform", "data"))
    assert pipeline.prediction == chosen.prediction, "people see what moving would bring"
    forbidden = "(data_stays: true forbids it; set data_stays: false)."
    assert uniform.reason == f"the labels of hub's texts would go to cam-2 {forbidden}"
    assert "hub's texts would go to cam-" in pipeline.reason
    assert "the ids of hub's texts would go to cam-" in pipeline.reason
    assert data.reason.startswith("rows of hub would go to cam-1")
    with pytest.raises(BadInput, match="strategy: 'pipeline' cannot be carried out: the ids of hub's texts would go"):
        best(stays, "pipeline")
    said = if_data_moved(job(batch_size=8), smollm2(), measured, pool, [], best(stays), stays)
    assert said is not None
    assert said.startswith("If data could move, hub + cam-1 + cam-2 (strategy pipeline) would take ")


def test_owners_may_each_walk_their_own_rows() -> None:
    pool = [profile("hub", link=SLOW), profile("cam-1", link=SLOW), profile("cam-2", link=SLOW)]
    found = plans(job(), smollm2(), work(), pool, must=["cam-2"])
    data = of("data", found)
    assert (data.feasible, data.moves_data) == (True, False)
    assert data.plan is not None
    assert [(device.name, device.speed) for device in data.plan.devices] == [("hub", 0.0), ("cam-2", 0.0)]
    assert best(found).strategy == "data"
    assert "cam-1 has no data, and data stay." in data.plan.why
    moved = of("data", plans(job(data_stays=False), smollm2(), work(), pool, must=["cam-2"]))
    assert moved.plan is not None
    assert all(device.speed > 0 for device in moved.plan.devices)


def test_more_stages_than_micro_batches_are_refused_with_the_numbers() -> None:
    pool = [profile(f"d{i}", link=QUICK) for i in range(3)]
    found = plans(job(data_stays=False, micro_batch_size=2), smollm2(), work(), pool)
    uniform, pipeline = of("pipeline-uniform", found), of("pipeline", found)
    assert uniform.plan is None
    assert "3 stages of a pipeline need at least 3 micro-batches a step, and a step has 2 micro-batches of 2 rows" in (
        uniform.reason
    )
    assert pipeline.feasible
    assert pipeline.plan is not None
    assert len(pipeline.plan.devices) == 2
    whole = plans(job(data_stays=False, micro_batch_size=4), smollm2(), work(), pool)
    with pytest.raises(
        BadInput, match=r"strategy: 'pipeline' cannot be carried out: 2 stages .* has 1 micro-batch of 4"
    ):
        best(whole, "pipeline")


@pytest.mark.parametrize("stays", [True, False])
def test_dora_of_all_linears_leaves_tensor_out_and_says_why(stays: bool) -> None:
    pool, dora = [profile("hub", link=QUICK), profile("cam", link=QUICK)], {"use_dora": True}
    wanted = job(batch_size=16, data_stays=stays, lora=dora)
    found = plans(wanted, smollm2(), work(), pool, [] if not stays else ["cam"])
    for strategy in ("tensor", "tensor-uniform"):
        candidate = of(strategy, found)
        assert (candidate.feasible, candidate.plan) == (False, None)
        assert "every row of o_proj and down_proj. Leave these out of lora.targets" in candidate.reason
        with pytest.raises(BadInput, match=f"strategy: '{strategy}' cannot be carried out: lora.use_dora norms"):
            best(found, strategy)
    chosen = best(found)
    assert chosen.strategy in ("data", "pipeline", "pipeline-uniform")
    moved = if_data_moved(wanted, smollm2(), work(), pool, ["cam"], chosen, found)
    assert moved is None or "tensor" not in moved
    columns = job(batch_size=16, data_stays=stays, lora=dora | {"targets": ["q_proj", "v_proj"]})
    assert of("tensor", plans(columns, smollm2(), work(), pool, [])).feasible
    assert of("tensor", plans(wanted, smollm2(), work(), pool[:1], [])).reason == "there is one device only."


def test_a_strategy_that_does_not_fit_says_how_much_is_missing_where() -> None:
    hub = profile("hub", link=QUICK, available=OWNER_BYTES + 470 * MIB)
    pool = [hub, profile("cam-1", link=QUICK, available=900 * MIB)]
    found = plans(job(data_stays=False), smollm2(), work(), pool)
    for strategy, short_of_memory in (("pipeline-uniform", "hub"), ("data", "hub"), ("pipeline", "hub|cam-1")):
        candidate = of(strategy, found)
        assert not candidate.feasible
        assert re.search(rf"0\.\d\d GiB are missing on ({short_of_memory})", candidate.reason)
    with pytest.raises(BadInput, match=r"strategy: 'data' cannot be carried out: 0\.\d\d GiB are missing on hub"):
        best(found, "data")
