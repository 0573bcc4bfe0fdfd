"""Whose turn it is: every example once an epoch, no owner left out, nobody asks."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.pool.owner import Feed
from potluck.pool.turns import Turns
from potluck.texts.batch import Example
from potluck.texts.order import Order, micro_batches

counts = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


def example(n: int, marker: int) -> Example:
    return Example((marker, *range(3, 3 + n)), (False, *[True] * n), "here", 1, None)


@given(counts, st.integers(1, 20), st.integers(0, 3))
def test_an_epoch_takes_each_turn_of_each_owner_once(examples: list[int], batch_size: int, epoch: int) -> None:
    turns = Turns(examples, batch_size)
    per_epoch = turns.steps_per_epoch
    taken = [turn for step in range(epoch * per_epoch, (epoch + 1) * per_epoch) for turn in turns.of(step)]
    assert len(taken) == len(set(taken))
    needed = {rank: -(-count // turns.examples_a_turn) for rank, count in enumerate(examples) if count}
    assert Counter(owner for owner, _ in taken) == needed
    for owner, count in needed.items():
        assert sorted(turn for who, turn in taken if who == owner) == [*range(epoch * count, (epoch + 1) * count)]


@given(counts, st.integers(1, 20))
def test_a_step_takes_about_the_batch_size(examples: list[int], batch_size: int) -> None:
    turns = Turns(examples, batch_size)
    owners = len(turns.owners)
    assert batch_size <= owners * turns.examples_a_turn < batch_size + owners
    steps = [turns.of(step) for step in range(turns.steps_per_epoch)]
    assert all(len(step) == owners for step in steps[:-1])
    assert 1 <= len(steps[-1]) <= owners


@given(counts, st.integers(1, 20))
def test_who_runs_out_is_told_while_others_go_on(examples: list[int], batch_size: int) -> None:
    turns = Turns(examples, batch_size)
    last = {owner: step for step in range(turns.steps_per_epoch) for owner, _ in turns.of(step)}
    end = turns.steps_per_epoch - 1
    told = {owner: step for step in range(turns.steps_per_epoch) for owner in turns.run_out_after(step)}
    assert told == {owner: step for owner, step in last.items() if step < end}


def test_all_owners_come_in_every_step_until_one_runs_out() -> None:
    turns = Turns([8, 0, 4], batch_size=4)
    assert turns.examples_a_turn == 2
    assert [turns.of(step) for step in range(3)] == [[(0, 0), (2, 0)], [(0, 1), (2, 1)], [(0, 2), (0, 3)]]
    assert turns.run_out_after(1) == [2]


def test_one_owner_has_the_order_of_its_examples() -> None:
    examples = [example(n, 100 + n) for n in (5, 3, 9, 4, 2, 7, 6)]
    turns = Turns([7], batch_size=3)
    feed = Feed(examples, examples_a_turn=turns.examples_a_turn, micro_batch_size=2, seed=5)
    order = Order([len(each.ids) for each in examples], 3, 5)
    for step in range(2 * turns.steps_per_epoch):
        batches = [batch for _, turn in turns.of(step) for batch in feed.batches(turn)]
        wanted = [[100 + len(examples[i].ids) - 1 for i in part] for part in micro_batches(order.indices(step), 2)]
        assert [batch.ids_BS[:, 0].tolist() for batch in batches] == wanted


def test_nobody_owns_anything() -> None:
    with pytest.raises(ValueError, match="need examples"):
        Turns([0, 0], 4)
