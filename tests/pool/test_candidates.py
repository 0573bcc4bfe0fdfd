"""Plans of every strategy: what always holds of them, which is chosen, and what is said."""

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
    fitted = 0
    while measured < 1000:
        pool = random_pool(random, int(random.integers(2, 7)), tight=bool(random.random() < 0.3))
        measured += len(pool)
        must = [p.device for p in pool[1:] if random.random() < 0.2]
        found = plans(job(half_batches=int(random.integers(1, 3))), decoder, work(), pool, must)
        for c in found:
            if c.plan is None or c.prediction is None:
                assert not c.feasible
                continue
            for kind, total in totals.items():
                held = [getattr(device, kind) for device in c.plan.devices]
                assert [i for ranges in held for i in ranges] == list(range(total))
            over = [d for d in c.prediction.devices if d.memory_bytes > d.available_bytes]
            assert not (c.feasible and over)
            assert c.feasible or c.reason
            if c.strategy == "tensor":
                assert {pool[0].device, *must} <= {d.name for d in c.plan.devices}
        tensor, uniform = of("tensor", found), of("tensor-uniform", found)
        if uniform.feasible and uniform.prediction:
            assert tensor.prediction is not None
            assert tensor.prediction.step_s <= uniform.prediction.step_s * (1 + 1e-9)
            fitted += 1
    assert fitted > 100


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
    said = if_data_moved(job(), smollm2(), work(), pool, ["old"], chosen)
    assert said is not None
    assert said.startswith("If data could move, hub + cam-1 would take ")
    assert (
        if_data_moved(job(), smollm2(), work(), pool[:2], [], best(plans(job(), smollm2(), work(), pool[:2]))) is None
    )


def test_data_that_may_move_show_each_device_alone() -> None:
    slow = Link(latency_s=0.003, bytes_per_s=1e7)
    pool = [profile("old", speed=0.2, link=slow), profile("hub", link=slow)]
    found = plans(job(data_stays=False), smollm2(), work(), pool)
    singles = {c.plan.devices[0].name: c for c in found if c.strategy == "single" and c.plan}
    assert singles["old"].feasible
    assert not singles["hub"].feasible
    assert singles["hub"].reason == "hub is not where this run starts: move the data there and train there alone."
    stays = if_data_moved(job(), smollm2(), work(), pool, [], singles["old"])
    assert stays is not None
    assert stays.startswith("If data could move, hub alone would take ")


def test_a_device_without_memory_is_left_out_and_named() -> None:
    pool = [profile("hub", link=QUICK), profile("cam-1", link=QUICK, available=100 * MIB), profile("pi", link=QUICK)]
    chosen = best(plans(job(), smollm2(), work(), pool))
    assert chosen.plan is not None
    assert [device.name for device in chosen.plan.devices] == ["hub", "pi"]
    assert "cam-1 is left out for want of memory." in chosen.reason
