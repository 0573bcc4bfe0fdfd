"""Stages of a pipeline: the best of all there are, whatever fits, and what is said where nothing does."""

from itertools import combinations, permutations, product
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig

from pool.profiles import MIB, SMOLLM2, job, profile, work
from potluck.errors import BadInput
from potluck.models.families.decoder import Decoder
from potluck.models.families.llama import llama
from potluck.pool.profile import Link, Profile
from potluck.pool.stage_costs import Stage, predict_stages, stage_costs
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


def all_steps(task: Any, pool: list[Profile], owners: list[str], sizes: list[int]) -> list[float]:
    """Every step there is, that fits."""
    the_job, model = task
    steps = []
    needed = {i for i, p in enumerate(pool) if i == 0 or p.device in owners}
    for rows in sizes:
        costs = stage_costs(the_job, model, work(), pool, owners, rows)
        for size in range(2, min(len(pool), len(costs.rows)) + 1):
            for order in permutations(range(len(pool)), size):
                if not needed <= set(order):
                    continue
                for cuts in combinations(range(1, costs.links), size - 1):
                    at = [0, *cuts, costs.links]
                    stages = [Stage(d, a, b) for d, a, b in zip(order, at, at[1:], strict=False)]
                    predicted = predict_stages(costs, stages)
                    if all(d.memory_bytes <= d.available_bytes for d in predicted.devices):
                        steps.append(predicted.step_s)
    return steps


@pytest.mark.parametrize("seed", range(40))
def test_best_stages_are_the_best_of_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    model = decoder(num_hidden_layers=3)
    pool = random_pool(random, 2 + seed % 2, tight=seed % 4 > 1)
    owners = [p.device for p in pool[1:] if random.random() < 0.2]
    the_job = job(batch_size=int(random.integers(4, 8)), train="full" if seed % 5 == 0 else "lora")
    measured = work(train=the_job.train)
    sizes = micro_batch_sizes(the_job, measured, 1 + len(owners))
    steps = all_steps((the_job, model), pool, owners, sizes)
    found = best_stages(the_job, model, work(), pool, owners)
    if not steps:
        assert any(d.memory_bytes > d.available_bytes for d in found.prediction.devices)
        return
    assert found.proven
    assert found.prediction.step_s == pytest.approx(min(steps), rel=2e-4)
