"""Every example once an epoch, near in length, the same from any step and in any process."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.texts.order import Order, micro_batches

lengths_of_examples = st.lists(st.integers(1, 2000), min_size=1, max_size=300)


@given(lengths_of_examples, st.integers(1, 40), st.integers(-5, 2**70), st.integers(0, 3))
def test_an_epoch_takes_every_example_once(lengths: list[int], batch_size: int, seed: int, epoch: int) -> None:
    order = Order(lengths, batch_size, seed)
    per_epoch = order.batches_per_epoch
    batches = [order.indices(step) for step in range(epoch * per_epoch, (epoch + 1) * per_epoch)]
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert 1 <= len(batches[-1]) <= batch_size


@given(lengths_of_examples, st.integers(1, 40), st.integers(0, 9), st.lists(st.integers(0, 500), max_size=8))
def test_a_step_is_the_same_whatever_was_asked_before(
    lengths: list[int], batch_size: int, seed: int, steps: list[int]
) -> None:
    used = Order(lengths, batch_size, seed)
    for step in steps:
        assert used.indices(step) == Order(lengths, batch_size, seed).indices(step)


def test_what_is_returned_is_the_callers() -> None:
    order = Order([1, 2, 3, 4], batch_size=2, seed=0)
    order.indices(0).clear()
    assert len(order.indices(0)) == 2


def test_epochs_and_seeds_differ() -> None:
    def epoch_of(seed: int, epoch: int) -> list[list[int]]:
        order = Order([1] * 64, batch_size=8, seed=seed)
        return [order.indices(epoch * 8 + step) for step in range(8)]

    drawn = [epoch_of(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(a != b for i, a in enumerate(drawn) for b in drawn[:i])


def test_batches_hold_similar_lengths_and_do_not_come_by_length() -> None:
    lengths = [(i * 7919) % 1000 + 1 for i in range(3200)]
    order = Order(lengths, batch_size=16, seed=3)
    batches = [order.indices(step) for step in range(order.batches_per_epoch)]
    padded = sum(len(batch) * max(lengths[i] for i in batch) for batch in batches)
    assert padded < 1.05 * sum(lengths)
    longest = [max(lengths[i] for i in batch) for batch in batches]
    rising = sum(a <= b for a, b in itertools.pairwise(longest))
    assert 0.4 < rising / len(longest) < 0.6


def test_an_epoch_of_ten_is_as_it_always_was() -> None:
    # A changed order would break the resuming of runs begun with an earlier version.
    order = Order([5, 3, 9, 1, 7, 2, 8, 6, 4, 10], batch_size=4, seed=0)
    assert [order.indices(step) for step in range(4)] == [[7, 4, 6, 2], [3, 1, 8, 0], [5, 9], [5, 1, 8, 7]]


def test_another_process_with_another_hash_seed_agrees() -> None:
    program = (
        "from potluck.texts.order import Order\n"
        "o = Order([i * 37 % 101 + 1 for i in range(500)], batch_size=8, seed=11)\n"
        "print([o.indices(s) for s in range(100)])"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] != ""


@given(st.lists(st.integers()), st.integers(1, 20))
def test_micro_batches_are_parts_in_order(indices: list[int], size: int) -> None:
    parts = micro_batches(indices, size)
    assert [i for part in parts for i in part] == indices
    assert all(len(part) == size for part in parts[:-1])
    assert all(0 < len(part) <= size for part in parts)


def test_senseless_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="examples"):
        Order([], batch_size=1, seed=0)
    with pytest.raises(ValueError, match="batch"):
        Order([1], batch_size=0, seed=0)
    with pytest.raises(ValueError, match="from 0"):
        Order([1], batch_size=1, seed=0).indices(-1)
    with pytest.raises(ValueError, match="micro-batch"):
        micro_batches([1], 0)
