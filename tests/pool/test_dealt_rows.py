"""Rows dealt to devices against all ways to deal them, and what a step of ``data`` costs against sums by hand."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.profiles import job, profile, small_task, work
from potluck.errors import BadInput
from potluck.models.families import decoder_of
from potluck.models.families.fields import config_from
from potluck.pool.cost import OWNER_BYTES, Units, predict
from potluck.pool.dealing import deal_rows
from potluck.pool.profile import Line, Link, Profile
from potluck.pool.reduce import CHUNK_BYTES
from potluck.pool.rows import best_rows, plan_rows, predict_data
from potluck.pool.task import Task, task_of

LENGTHS = st.lists(st.integers(1, 30), max_size=7)
SPEEDS = st.lists(st.floats(0.1, 4.0), min_size=1, max_size=3)
WORK = work(rows=2)
LINK = Link(latency_s=0.004, bytes_per_s=1e6, world_size=2)
TRAINED = 6 * 300 + 3 * 200 + 7 * 100 + 1000
"""Elements of ``small_task()``."""


def slowest_s(lengths: Sequence[int], speeds: Sequence[float], dealt: Sequence[Sequence[int]]) -> float:
    return max(sum(lengths[row] for row in rows) / speed for rows, speed in zip(dealt, speeds, strict=True) if rows)


def fewest_s(lengths: Sequence[int], speeds: Sequence[float]) -> float:
    """Of all ways to deal these rows."""
    ways = product(range(len(speeds)), repeat=len(lengths))
    return min(
        slowest_s(lengths, speeds, [[r for r, d in enumerate(way) if d == device] for device in range(len(speeds))])
        for way in ways
    )


@given(LENGTHS, SPEEDS)
def test_every_row_is_walked_once_and_no_way_is_much_faster(lengths: list[int], speeds: list[float]) -> None:
    dealt = deal_rows(lengths, speeds)
    assert sorted(row for rows in dealt for row in rows) == list(range(len(lengths)))
    assert all(rows == sorted(rows) for rows in dealt)
    assert len(dealt) == len(speeds)
    assert dealt == deal_rows(tuple(lengths), tuple(speeds))
    if lengths:
        m = len(speeds)
        assert slowest_s(lengths, speeds, dealt) <= (2 - 2 / (m + 1)) * fewest_s(lengths, speeds) * (1 + 1e-12)


@given(st.integers(1, 6), st.integers(1, 40), SPEEDS)
def test_rows_of_one_length_are_dealt_best(count: int, length: int, speeds: list[float]) -> None:
    lengths = [length] * count
    assert slowest_s(lengths, speeds, deal_rows(lengths, speeds)) == pytest.approx(fewest_s(lengths, speeds))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=24), SPEEDS)
def test_no_row_and_no_swap_would_make_the_slowest_faster(lengths: list[int], speeds: list[float]) -> None:
    dealt = deal_rows(lengths, speeds)
    tokens = [sum(lengths[row] for row in rows) for rows in dealt]
    times = [t / speed for t, speed in zip(tokens, speeds, strict=True)]
    slowest = times.index(max(times))
    for other, rows in enumerate(dealt):
        for row, back in product(dealt[slowest], [None, *rows]):
            given_away = lengths[row] - (0 if back is None else lengths[back])
            if other != slowest and given_away > 0:
                after = (tokens[slowest] - given_away) / speeds[slowest], (tokens[other] + given_away) / speeds[other]
                assert max(after) >= times[slowest]


def test_a_swap_is_found_where_dealing_the_longest_first_is_not_best() -> None:
    lengths = [3, 3, 2, 2, 2]  # the longest first makes 7 and 5
    assert slowest_s(lengths, [1.0, 1.0], deal_rows(lengths, [1.0, 1.0])) == 6


def test_a_device_without_speed_gets_no_row() -> None:
    assert deal_rows([5, 4, 3], [0.0, 1.0]) == [[], [0, 1, 2]]
    assert deal_rows([], [1.0, 1.0]) == [[], []]


@pytest.mark.parametrize("speeds", [[], [0.0, 0.0], [1.0, -1.0]], ids=str)
def test_rows_need_a_device_that_can_walk(speeds: list[float]) -> None:
    with pytest.raises(ValueError, match="speed above 0"):
        deal_rows([1], speeds)


def device(name: str, scale: float = 1.0, link: Link | None = LINK, **differs: Any) -> Profile:
    fields: dict[str, Any] = {
        "attention_s": Line(alpha=0.01 * scale, beta=0.02 * scale),
        "mlp_s": Line(alpha=0.005 * scale, beta=0.03 * scale),
        "head_s": Line(alpha=0.001 * scale, beta=0.01 * scale),
        "optimizer_s": Line(alpha=0.002, beta=1e-6 * scale),
        "attention_bytes": Line(alpha=1000.0, beta=100.0),
        "mlp_bytes": Line(alpha=500.0, beta=10.0),
        "runtime_bytes": 1_000_000,
        "link": link,
        "of": WORK,
    }
    return profile(name, **fields | differs)


def walk_s(scale: float, rows: int) -> float:
    """Rows through the whole small model on a device of this scale."""
    return scale * rows / 2 * (3 * (0.01 + 0.02 * 6) + 2.5 * (0.005 + 0.03 * 7) + 0.001 + 0.01 * 5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_one_device_is_the_same_as_single(checkpointing: bool) -> None:
    task = small_task(half_batches=1, micro_batches=3, checkpointing=checkpointing)
    single = predict(task, [device("a")], [Units(6, 7, 5)])
    said = predict_data(task, [device("a")], [3 * 2], 2)
    assert said.step_s == pytest.approx(single.step_s)
    assert (said.message_s, said.idle_ratio, said.devices[0].bytes_sent) == (0, 0, 0)
    assert said.devices[0].memory_bytes == pytest.approx(single.devices[0].memory_bytes)


def test_three_devices_by_hand() -> None:
    pool = [device("a"), device("b", 2), device("c", 2, Link(latency_s=0.001, bytes_per_s=9e6))]
    said = predict_data(small_task(), pool, [4, 2, 0], 2)
    once = [0.002 + 1e-6 * scale * TRAINED / 3 for scale in (1, 2, 2)]
    walks = [walk_s(1, 4), walk_s(2, 2), 0.0]
    gradients = 4 * TRAINED
    ids = (128 + 256 / 2) * 8
    # layouts, norm, clocks: 4; gradients: 1; values: one a home; rows: 1.
    message = (5 + 3 + 1) * 0.004 + (2 / 3 * gradients + 2 / 3 * gradients + 2 * ids) / 1e6
    assert said.message_s == pytest.approx(message)
    assert said.step_s == pytest.approx(max(walks) + max(once) + message)
    for d, walk, step in zip(said.devices, walks, once, strict=True):
        assert d.compute_s == pytest.approx(walk + step)
        assert d.wait_s == pytest.approx(max(walks) + max(once) - d.compute_s)
    assert said.idle_ratio == pytest.approx(sum(d.wait_s for d in said.devices) / 3 / said.step_s)
    half = 2 / 3 * gradients
    assert [d.bytes_sent for d in said.devices] == pytest.approx([2 * half + 2 * ids, 2 * half, half])


def test_rows_that_stay_are_not_sent() -> None:
    pool = [device("a"), device("b")]
    moved, stays = (predict_data(small_task(), pool, [3, 3], 2, owners=["b"], moved=m) for m in (True, False))
    ids = (128 + 256 / 2) * 8
    assert moved.message_s - stays.message_s == pytest.approx(0.004 + 3 * ids / 1e6)
    assert [d.bytes_sent for d in stays.devices] == pytest.approx([4 * TRAINED] * 2)


def test_memory_by_hand() -> None:
    task = small_task(half_batches=1)
    pool = [device("a"), device("b"), device("c")]
    at_once = {rows: predict_data(task, pool, [4, 4, 4], rows).devices for rows in (1, 2, 4)}
    graph = 1000 + 100 * 6 + 500 + 10 * 7
    weights = 6 * 101_003 + 3 * 50_021 + 7 * 70_001 + 5 * 30_011 + 9_000
    gradients = 4 * TRAINED
    moments_elsewhere = 2 * gradients * (1 - 1 / 3)
    reducing = 4 * 2 * min(CHUNK_BYTES, gradients / 3)
    expected = 1_000_000 + 5_000 + weights - moments_elsewhere + 4 * graph + reducing
    assert at_once[2][1].memory_bytes == pytest.approx(expected)
    assert at_once[2][0].memory_bytes == pytest.approx(expected + OWNER_BYTES)
    assert at_once[1][1].memory_bytes == pytest.approx(expected - 2 * graph)
    assert at_once[4][1].memory_bytes == pytest.approx(expected + 4 * graph + 5_000)


def test_rows_go_by_speed_and_as_many_at_once_as_fit() -> None:
    task = small_task(half_batches=1)
    pool = [device("a"), device("b", 2), device("c", 2)]
    plan = plan_rows(task, pool, 8)
    assert plan.rows == (4, 2, 2)
    assert plan.speeds == pytest.approx([2 / walk_s(scale, 2) for scale in (1, 2, 2)])
    assert plan.micro_batch_size == 2, "no more than were measured"
    needed = plan.prediction.devices[2].memory_bytes
    assert needed == predict_data(task, pool, [4, 2, 2], 2).devices[2].memory_bytes
    short = [*pool[:2], device("c", 2, available_bytes=int(needed) - 1)]
    fits = plan_rows(task, short, 8)
    assert fits.micro_batch_size == 1
    assert fits.prediction.devices[2].memory_bytes < needed
    hopeless = plan_rows(task, [*pool[:2], device("c", 2, available_bytes=10)], 8)
    assert hopeless.prediction.devices[2].memory_bytes > hopeless.prediction.devices[2].available_bytes


def test_each_owner_walks_its_own_where_data_stay() -> None:
    pool = [device("a"), device("b", 2)]
    plan = plan_rows(small_task(), pool, 6, owners=["b"], moved=False)
    assert (plan.rows, plan.speeds) == ((3, 3), (0.0, 0.0))
    assert plan.prediction.step_s > walk_s(2, 3)
    with pytest.raises(BadInput, match="b would have no rows"):
        plan_rows(small_task(), pool, 6, moved=False)


def test_a_device_without_a_link_is_named() -> None:
    with pytest.raises(BadInput, match="profile of b has no link"):
        plan_rows(small_task(), [device("a"), device("b", link=None)], 6)


def test_the_best_group_is_the_best_of_all() -> None:
    task = small_task()
    slow_link = Link(latency_s=0.5, bytes_per_s=1e5)
    pool = [device("a", 3), device("b", 1), device("c", 1, slow_link), device("d", 2)]
    members, plan = best_rows(task, pool, 8)
    assert members == (0, 1, 3)
    others = [(0, 1), (0, 3), (0, 1, 2), (0, 1, 2, 3)]
    steps = [plan_rows(task, [pool[i] for i in group], 8).prediction.step_s for group in others]
    assert plan.prediction.step_s < min(steps)
    assert 2 in best_rows(task, pool, 8, owners=["c"])[0], "owners take part"
    full = [*pool[:3], device("d", 2, available_bytes=10)]
    assert best_rows(task, full, 8)[0] == (0, 1), "what does not fit is left out"


def test_many_devices_are_added_by_speed() -> None:
    pool = [device("coordinator"), *(device(f"d{i}", 1 + i % 5) for i in range(10))]
    members, plan = best_rows(small_task(), pool, 12)
    chosen = {pool[i].attention_s.alpha for i in members[1:]}
    left = {pool[i].attention_s.alpha for i in range(1, 11) if i not in members}
    assert max(chosen) <= min(left, default=1.0)
    assert sum(plan.rows) == 12


def real_task(train: str) -> Task:
    at = work(train=train)
    return task_of(job(train=train), decoder_of(config_from(at.config)), at)


def test_full_fine_tuning_sends_the_model_and_adapters_are_small() -> None:
    pool = [profile("a"), profile("b")]
    lora, full = (predict_data(real_task(train), pool, [2, 2], 2) for train in ("lora", "full"))
    parameters = 134_515_008 - 49152 * 576  # of SmolLM2 without the embedding, which is frozen
    assert full.devices[0].bytes_sent == pytest.approx(4 * parameters, rel=0.01)
    assert lora.devices[0].bytes_sent < 0.03 * full.devices[0].bytes_sent
    assert full.message_s > 20 * lora.message_s
