"""1F1B event by event: small cases by hand, what holds of all, and another way to the same numbers."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck.chain.comm import Comm
from potluck.pool.simulate import Simulated, simulate
from potluck.pool.strategies.boxes import Inbox, Outbox
from potluck.pool.strategies.schedule import one_forward_one_backward
from worlds import run_world

SECONDS = st.floats(0, 10)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]], int, list[list[float]]]:
    P, M = draw(st.integers(1, 5)), draw(st.integers(1, 9))

    def each(count: int) -> list[list[float]]:
        return [draw(st.lists(SECONDS, min_size=M, max_size=M)) for _ in range(count)]

    return each(P), each(P), M, each(P - 1)


def relaxed(
    forward: list[list[float]], backward: list[list[float]], micro_batches: int, messages: list[list[float]]
) -> float:
    """The same step, by raising every walk's start until all that must come before it does."""
    P, M = len(forward), micro_batches
    orders = [list(one_forward_one_backward(s, P, M)) for s in range(P)]
    start = {(s, *walk): 0.0 for s in range(P) for walk in orders[s]}
    arrival = {(s, *walk): 0.0 for s in range(P) for walk in orders[s]}

    def end(s: int, direction: str, m: int) -> float:
        return start[s, direction, m] + (forward if direction == "forward" else backward)[s][m]  # type: ignore[index]

    for _ in range(4 * P * M + 4):
        before = dict(start)
        for s in range(P):
            for i, (direction, m) in enumerate(orders[s]):
                source, wire = (s - 1, s - 1) if direction == "forward" else (s + 1, s)
                earliest = end(s, *orders[s][i - 1]) if i else 0.0
                if 0 <= source < P:
                    leaves = end(source, direction, m)
                    if m:
                        leaves = max(leaves, arrival[s, direction, m - 1], start[s, direction, m - 1])
                    arrival[s, direction, m] = leaves + messages[wire][m]
                    earliest = max(earliest, arrival[s, direction, m])
                start[s, direction, m] = earliest
        if start == before:
            break
    else:
        raise AssertionError("it does not settle")
    return max(end(s, *walk) for s in range(P) for walk in orders[s])


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_even_stages_without_messages_take_the_textbook_time(stages: int, micro_batches: int) -> None:
    run = simulate([1.0] * stages, [2.0] * stages, micro_batches)
    assert run.step_s == pytest.approx(3.0 * (micro_batches + stages - 1))
    assert run.busy_s == pytest.approx((3.0 * micro_batches,) * stages)
    assert run.idle_s == pytest.approx((3.0 * (stages - 1),) * stages)


def test_small_cases_by_hand() -> None:
    one = simulate([1.0, 3.0], [2.0, 1.0], 1, [0.5])
    assert one.step_s == pytest.approx(1 + 0.5 + 3 + 1 + 0.5 + 2)
    two = simulate([1.0, 3.0], [2.0, 1.0], 2, [0.5])  # stage 1: 1.5-4.5-5.5-8.5-9.5, then the gradient and 2 more
    assert two == Simulated(12.0, (6.0, 8.0))
    last_is_small = simulate([[1.0, 0.5], [3.0, 1.5]], [[2.0, 1.0], [1.0, 0.5]], 2, [[0.5, 0.5]])
    assert last_is_small.step_s == pytest.approx(1.5 + 4 + 2 + 0.5 + 1)


def test_a_link_carries_one_message_at_a_time() -> None:
    # forward messages arrive at 6 and 11, although the second was ready at 2
    run = simulate([1.0, 1.0, 1.0], [1.0, 1.0, 1.0], 2, [5.0, 0.0])
    assert run.step_s == pytest.approx(24.0)  # gradients leave at 13 and 18, although the second was ready at 15


@given(pipelines())
def test_the_same_as_by_relaxation(
    pipeline: tuple[list[list[float]], list[list[float]], int, list[list[float]]],
) -> None:
    assert simulate(*pipeline).step_s == pytest.approx(relaxed(*pipeline))


@given(pipelines())
def test_never_less_than_any_stage_or_any_way_through(
    pipeline: tuple[list[list[float]], list[list[float]], int, list[list[float]]],
) -> None:
    forward, backward, micro_batches, messages = pipeline
    run = simulate(*pipeline)
    assert run.step_s >= max(run.busy_s) - 1e-9
    assert min(run.idle_s) >= -1e-9
    for m in range(micro_batches):
        way = sum(each[m] for each in (*forward, *backward)) + 2 * sum(each[m] for each in messages)
        assert run.step_s >= way - 1e-9
    for s in range(len(forward)):
        before = sum(forward[k][0] + messages[k][0] + backward[k][-1] + messages[k][-1] for k in range(s))
        assert run.step_s >= before + run.busy_s[s] - 1e-9


@given(pipelines(), st.integers(0, 4), st.floats(0, 5))
def test_slower_walks_never_make_a_step_shorter(
    pipeline: tuple[list[list[float]], list[list[float]], int, list[list[float]]], stage: int, by: float
) -> None:
    forward, backward, micro_batches, messages = pipeline
    slower = [[s + by * (k == stage) for s in each] for k, each in enumerate(forward)]
    assert simulate(slower, backward, micro_batches, messages).step_s >= simulate(*pipeline).step_s - 1e-9


def test_what_is_no_pipeline_is_refused() -> None:
    for wrong in (([], [], 1), ([1.0], [1.0, 1.0], 1), ([1.0], [1.0], 0), ([1.0, 1.0], [1.0, 1.0], 1, [0.1, 0.1])):
        with pytest.raises(ValueError, match="no pipeline"):
            simulate(*wrong)
    with pytest.raises(ValueError, match="each of 2 micro-batches"):
        simulate([[1.0]], [1.0], 2)


WALKS_S = [(0.02, 0.03), (0.05, 0.06), (0.01, 0.04)]
"""Forward and backward seconds of three uneven stages."""


def slept(comm: Comm, micro_batches: int) -> float:
    """Seconds of a step whose walks are sleeps, with real messages between."""
    s, P = comm.rank, comm.world_size
    outboxes = {to: Outbox(comm, to, 1, most=micro_batches) for to in (s - 1, s + 1) if 0 <= to < P}
    comm.all_reduce(torch.zeros(1)).wait()
    start = time.perf_counter()
    inboxes = {source: Inbox(comm, source, 1, [(64,)] * micro_batches, torch.float32) for source in outboxes}
    for direction, _ in one_forward_one_backward(s, P, micro_batches):
        source, to = (s - 1, s + 1) if direction == "forward" else (s + 1, s - 1)
        if source in inboxes:
            inboxes[source].take()
        time.sleep(WALKS_S[s][direction == "backward"])
        if to in outboxes:
            outboxes[to].put(torch.zeros(64))
    for outbox in outboxes.values():
        outbox.empty()
    return time.perf_counter() - start


@pytest.mark.timing
@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_real_messages_take_as_long(micro_batches: int) -> None:
    expected = simulate([f for f, _ in WALKS_S], [b for _, b in WALKS_S], micro_batches).step_s
    took = min(max(run_world(3, lambda comm: slept(comm, micro_batches))) for _ in range(3))  # others compute too
    assert took == pytest.approx(expected, rel=0.15)
