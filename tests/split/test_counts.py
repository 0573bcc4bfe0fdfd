"""Each epoch takes every example of every client once, in steps of the batch's size."""

from hypothesis import given
from hypothesis import strategies as st

from potluck.split.counts import step_counts

CLIENTS = st.lists(st.integers(1, 60), min_size=1, max_size=9)


@given(CLIENTS, st.integers(1, 40), st.integers(1, 3))
def test_an_epoch_takes_every_example_once(examples: list[int], batch_size: int, epochs: int) -> None:
    per_epoch = -(-sum(examples) // batch_size)
    counts = step_counts(examples, batch_size, per_epoch * epochs)
    for own, of_client in zip(counts, examples, strict=True):
        assert len(own) == per_epoch * epochs
        assert all(sum(own[e * per_epoch : (e + 1) * per_epoch]) == of_client for e in range(epochs))


@given(CLIENTS, st.integers(1, 40))
def test_steps_are_full_but_for_the_last(examples: list[int], batch_size: int) -> None:
    """Also where there are more clients than a step has examples."""
    per_epoch = -(-sum(examples) // batch_size)
    sizes = [sum(step) for step in zip(*step_counts(examples, batch_size, per_epoch), strict=True)]
    assert sizes[:-1] == [batch_size] * (per_epoch - 1)
    assert 0 < sizes[-1] <= batch_size


@given(CLIENTS, st.integers(1, 40))
def test_a_client_is_spread_evenly_over_the_epoch(examples: list[int], batch_size: int) -> None:
    total = sum(examples)
    per_epoch = -(-total // batch_size)
    for own, of_client in zip(step_counts(examples, batch_size, per_epoch), examples, strict=True):
        taken = 0
        for step, count in enumerate(own, 1):
            taken += count
            assert abs(taken - of_client * min(1.0, step * batch_size / total)) <= len(examples)


def test_steps_may_end_within_an_epoch() -> None:
    assert step_counts([4, 2], 3, 3) == [[2, 2, 2], [1, 1, 1]]
    assert step_counts([1, 1, 1, 1], 1, 2) == [[1, 0], [0, 1], [0, 0], [0, 0]]
