import sys

import pytest

from potluck.bench.pool_counters import Counter, Stalls


def counter() -> Counter:
    try:
        return Counter("task_clock")
    except OSError as error:
        pytest.skip(f"this kernel counts nothing for us: {error}")


@pytest.mark.skipif(sys.platform != "linux", reason="perf_event_open is Linux's")
def test_a_counter_counts_what_this_thread_does() -> None:
    clock_ns = counter()
    before = clock_ns.read()
    assert sum(range(200_000)) > 0
    once = clock_ns.read() - before
    assert 10_000 < once < 10**9


def test_stalls_are_a_part_of_the_cycles_or_not_counted_at_all() -> None:
    stalls = Stalls()
    assert sum(range(100_000)) > 0
    ratio = stalls.ratio()
    assert ratio is None or 0 <= ratio <= 1
