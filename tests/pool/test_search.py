"""The planner against trying everything, its bounds, and its speed."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from pool.profiles import GIB, MIB, SMOLLM2, job, profile, small_task, work
from potluck.models.families.llama import llama
from potluck.pool.cost import OWNER_BYTES, Units, costs_of, predict
from potluck.pool.profile import Line, Link, Profile
from potluck.pool.search import Found, NoFit, search, shares_of, water_level
from potluck.pool.task import Task, task_of

SECONDS = st.floats(0.0, 0.02)


@st.composite
def small_pools(
    draw: st.DrawFn, least: int = 1, rooms: tuple[float, float] | None = None
) -> tuple[Task, list[Profile], list[str]]:
    """A step, up to three devices, coordinator first, and which of them must take part.

    ``rooms`` bounds the part of the model that each has room for; there is room for all of it if left out.
    """
    task = small_task(
        (4, 3, 3),
        kv_heads=draw(st.sampled_from([1, 2, 4])),
        half_batches=draw(st.sampled_from([1, 2])),
        checkpointing=draw(st.booleans()),
    )
    count = draw(st.integers(least, 3))
    must = [f"d{i}" for i in range(1, count) if draw(st.booleans())]
    profiles = [
        profile(
            f"d{i}",
            link=Link(latency_s=draw(st.floats(0, 0.005)), bytes_per_s=draw(st.floats(1e6, 1e8)), world_size=3),
            attention_s=Line(alpha=draw(SECONDS), beta=draw(SECONDS)),
            mlp_s=Line(alpha=draw(SECONDS), beta=draw(SECONDS)),
            head_s=Line(alpha=draw(SECONDS), beta=draw(SECONDS)),
            forward_part=draw(st.floats(0.2, 0.5)),
            optimizer_s=Line(alpha=draw(SECONDS), beta=draw(st.floats(0, 1e-5))),
            attention_bytes=Line(alpha=10_000.0, beta=draw(st.floats(1, 30_000.0))),
            mlp_bytes=Line(alpha=5_000.0, beta=draw(st.floats(1, 20_000.0))),
            runtime_bytes=100_000,
        )
        for i in range(count)
    ]
    if rooms is not None:
        costs, two = costs_of(task, profiles, must), np.array([2.0])
        empty_D = costs.memory(np.zeros((1, count, 3), dtype=np.int64), two)[0]
        whole_D = costs.memory(np.tile(np.array(task.totals), (1, count, 1)), two)[0]
        drawn = [draw(st.floats(*rooms)) for _ in profiles]
        bytes_D = [int(e + room * (w - e)) for e, w, room in zip(empty_D, whole_D, drawn, strict=True)]
        profiles = [p.model_copy(update={"available_bytes": b}) for p, b in zip(profiles, bytes_D, strict=True)]
    return task, profiles, must


def shares(total: int, devices: int) -> Iterator[tuple[int, ...]]:
    if devices == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in shares(total - first, devices - 1):
            yield (first, *rest)


def best_by_trying_all(task: Task, profiles: Sequence[Profile], must: Sequence[str]) -> float | None:
    """The shortest predicted step of all shares of all groups that fit; ``check`` ties it to ``predict``."""
    best = np.inf
    for size in range(1, len(profiles) + 1):
        for group in itertools.combinations(profiles, size):
            if not {profiles[0].device, *must} <= {p.device for p in group}:
                continue
            every = itertools.product(*(list(shares(total, size)) for total in task.totals))
            units_MD3 = np.array(list(every), dtype=np.int64).swapaxes(1, 2)
            costs = costs_of(task, group, must)
            everybody_MD = np.ones(units_MD3.shape[:2], dtype=np.bool_)
            step_M, _ = costs.steps(everybody_MD, costs.segments(everybody_MD, units_MD3))
            memory_MD = costs.memory(units_MD3, np.full(len(units_MD3), float(size)))
            step_M = step_M[(memory_MD <= costs.available_D).all(1)]
            best = min(best, step_M.min(initial=np.inf))
    return best if np.isfinite(best) else None


def check(found: Found, task: Task, profiles: Sequence[Profile], must: Sequence[str]) -> None:
    """What holds of any plan: all units are held, nothing exceeds memory, and the step is the one predicted."""
    group = [profiles[i] for i in found.members]
    assert {profiles[0].device, *must} <= {p.device for p in group}
    sums = tuple(sum(getattr(u, name) for u in found.units) for name in ("heads", "columns", "vocab_rows"))
    assert sums == task.totals
    said = predict(task, group, found.units, owners=must)
    assert all(d.memory_bytes <= d.available_bytes for d in said.devices)
    assert said.step_s == pytest.approx(found.step_s, rel=1e-9)


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(small_pools(), small_pools(rooms=(-0.1, 1.2)), small_pools(least=2, rooms=(0.35, 0.8))))
def test_equals_trying_everything(pool: tuple[Task, list[Profile], list[str]]) -> None:
    task, profiles, must = pool
    best = best_by_trying_all(task, profiles, must)
    if best is None:
        with pytest.raises(NoFit, match="GiB are missing on d"):
            search(task, profiles, must)
        return
    found = search(task, profiles, must)
    assert found.proven
    check(found, task, profiles, must)
    assert found.step_s == pytest.approx(best, rel=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=4), st.integers(1, 12))
def test_units_given_in_closed_form_finish_as_early_as_given_one_by_one(
    lines: list[tuple[float, float]], total: int
) -> None:
    alpha_D, beta_D = (np.array(each) for each in zip(*lines, strict=True))
    beta_D = np.maximum(beta_D, 1e-9)
    members_MD = np.ones((1, len(lines)), dtype=np.bool_)
    level = water_level(alpha_D, beta_D, members_MD, total)[0]
    assert np.maximum(0, (level - alpha_D) / beta_D).sum() == pytest.approx(total, rel=1e-6)
    one_by_one = np.zeros(len(lines), dtype=np.int64)
    for _ in range(total):
        one_by_one[int((alpha_D + beta_D * (one_by_one + 1)).argmin())] += 1
    task = small_task((total, 3, 3), kv_heads=1)
    profiles = [
        profile(f"d{i}", attention_s=Line(alpha=float(a), beta=float(b)), optimizer_s=Line(alpha=0, beta=0))
        for i, (a, b) in enumerate(zip(alpha_D, beta_D, strict=True))
    ]
    units_D = shares_of(costs_of(task, profiles, ()), members_MD)[0, :, 0]
    assert units_D.sum() == total
    slowest = (alpha_D + beta_D * units_D).max()
    assert slowest == pytest.approx((alpha_D + beta_D * one_by_one).max(), rel=1e-9)


def test_of_equally_early_finishes_the_faster_device_takes_the_unit() -> None:
    task = small_task((1, 1, 1), kv_heads=1)
    none = Line(alpha=0, beta=0)
    slow_start = {name: Line(alpha=0.5, beta=0.25) for name in ("attention_s", "mlp_s", "head_s")}
    at_once = {name: Line(alpha=0.25, beta=0.5) for name in ("attention_s", "mlp_s", "head_s")}
    pool = [profile("a", optimizer_s=none, **at_once), profile("b", optimizer_s=none, **slow_start)]
    assert search(task, pool, ["b"]).units == (Units(0, 0, 0), Units(1, 1, 1))


def smollm2_task() -> Task:
    fields = {name: value for name, value in SMOLLM2.items() if name != "model_type"}
    return task_of(job(), llama(LlamaConfig(**fields)), work())


def test_a_slow_device_is_left_out_unless_it_must_take_part() -> None:
    pool = [profile("hub", speed=2), profile("cam"), profile("old", speed=0.1)]
    task = replace(smollm2_task(), message_bytes=1000.0)
    assert search(task, pool, []).members == (0, 1)
    assert 2 in search(task, pool, ["old"]).members
    assert search(task, [pool[0], pool[2]], []).members == (0,)
    assert search(task, [pool[0], pool[2]], [], at_least=2).members == (0, 1)


def test_what_is_missing_is_said_with_the_device() -> None:
    pool = [profile("hub", available=600 * MIB), profile("cam", available=700 * MIB)]
    with pytest.raises(NoFit, match=r"The model does not fit: 1\.\d\d GiB are missing on (hub|cam)\.") as caught:
        search(smollm2_task(), pool, [])
    enough = [
        p.model_copy(update={"available_bytes": p.available_bytes + int(1.1 * caught.value.missing_bytes)})
        if p.device == caught.value.device
        else p
        for p in pool
    ]
    check(search(smollm2_task(), enough, []), smollm2_task(), enough, [])
    with pytest.raises(NoFit, match="missing on cam"):  # not even room for what every device holds
        search(smollm2_task(), [profile("hub"), profile("cam", available=100 * MIB)], ["cam"])


@pytest.mark.timing
@pytest.mark.parametrize("tight", [False, True])
def test_sixteen_devices_take_less_than_two_seconds(tight: bool) -> None:
    random = np.random.default_rng(3)
    pool = [
        profile(
            f"d{i}",
            speed=random.uniform(0.2, 2),
            available=OWNER_BYTES + int(random.uniform(690, 910) * MIB) if tight else 64 * GIB,
        )
        for i in range(16)
    ]
    task = smollm2_task()
    start = time.process_time()
    found = search(task, pool, [], at_least=2)
    assert time.process_time() - start < 2
    check(found, task, pool, [])
    assert found.proven or tight


def test_more_than_sixteen_devices_are_tried_fastest_first() -> None:
    task = replace(smollm2_task(), message_bytes=1000.0)
    pool = [profile(f"d{i}", speed=1 + i / 20) for i in range(20)]
    found = search(task, pool, ["d3"])
    check(found, task, pool, ["d3"])
    others = [i for i in found.members if i not in (0, 3)]
    assert others == [i for i in range(20) if i not in (0, 3)][-len(others) :]
