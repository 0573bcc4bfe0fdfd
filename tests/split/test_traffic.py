"""An emulated link is as fast as it says, in both directions, and counting is exact."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from split_doors import hello, open_split, shard

from potluck.split.traffic import Rate, Traffic

SIZE = 2_000_000
SECONDS = 0.8  # at 20 Mbit/s


def timed(function: Callable[[], object]) -> float:
    start = time.monotonic()
    function()
    return time.monotonic() - start


@pytest.mark.timing
def test_two_megabytes_at_20_mbit_take_as_long_as_they_should(tmp_path: Path) -> None:
    path, sha256 = shard(tmp_path, bytes(SIZE))
    with open_split(tmp_path) as (door, backend), hello(door.invite, traffic=Traffic(20)) as uplink:
        (backend.folder / "result" / "adapter").write_bytes(bytes(SIZE))
        up = timed(lambda: uplink.send_shard(path, sha256))
        down = timed(lambda: list(uplink.fetch_result("adapter")))
        both = timed(lambda: uplink.step(1, bytes(SIZE)))
    assert up == pytest.approx(SECONDS, rel=0.15)
    assert down == pytest.approx(SECONDS, rel=0.15)
    assert both == pytest.approx(2 * SECONDS, rel=0.15)


@pytest.mark.timing
def test_requests_of_several_threads_share_a_link() -> None:
    rate = Rate(20)
    threads = [threading.Thread(target=lambda: [rate.take(10_000) for _ in range(25)]) for _ in range(4)]

    def run() -> None:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert timed(run) == pytest.approx(0.4, rel=0.15)


@pytest.mark.timing
def test_what_was_not_used_is_not_saved_up() -> None:
    rate = Rate(20)
    time.sleep(0.3)
    assert timed(lambda: rate.take(500_000)) == pytest.approx(0.2 - 0.02, rel=0.15)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1 << 40), st.integers(0, 1 << 40))))
def test_sums(counted: list[tuple[str, int, int]]) -> None:
    traffic = Traffic()
    for kind, sent, received in counted:
        traffic.count(kind, sent=sent, received=received)
    assert traffic.sent == sum(sent for _, sent, _ in counted)
    assert traffic.received == sum(received for *_, received in counted)
    assert traffic.to_json()["sent"].get("a", 0) == sum(sent for kind, sent, _ in counted if kind == "a")
