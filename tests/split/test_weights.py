"""No client counts more than its cap, and nobody counts less than need be."""

from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from potluck.errors import BadInput
from potluck.split.weights import capped_weights

TOKENS = st.lists(st.integers(0, 10_000), min_size=1, max_size=12)


def shares(tokens: list[int], weights: list[float]) -> list[float]:
    counted = [n * weight for n, weight in zip(tokens, weights, strict=True)]
    return [part / sum(counted) for part in counted]


@given(TOKENS, st.floats(0.02, 1.0))
def test_nobody_is_above_the_cap_and_who_was_below_counts_in_full(tokens: list[int], cap: float) -> None:
    contributing = sum(n > 0 for n in tokens)
    assume(contributing and cap * contributing >= 1)
    weights = capped_weights(tokens, cap)
    found = shares(tokens, weights)
    assert max(found) <= cap * (1 + 1e-9)
    assert all(0 < weight <= 1 for weight in weights)
    at_the_cap = [part >= cap * (1 - 1e-9) for part in found]
    # a weight below 1 is the cap's doing; with all at it, they are equal
    assert all(weight == 1.0 or capped for weight, capped in zip(weights, at_the_cap, strict=True))
    assert sum(weight == 1.0 for weight in weights) > 0


@given(TOKENS, st.floats(0.02, 1.0))
def test_a_larger_client_never_counts_less_in_all(tokens: list[int], cap: float) -> None:
    contributing = sum(n > 0 for n in tokens)
    assume(contributing and cap * contributing >= 1)
    counted = [n * weight for n, weight in zip(tokens, capped_weights(tokens, cap), strict=True)]
    by_tokens = [part for _, part in sorted(zip(tokens, counted, strict=True))]
    assert all(a <= b * (1 + 1e-9) for a, b in pairwise(by_tokens))


@given(TOKENS)
def test_without_a_cap_all_count_alike(tokens: list[int]) -> None:
    assert capped_weights(tokens, None) == capped_weights(tokens, 1.0) == [1.0] * len(tokens)


@pytest.mark.parametrize("clients", range(1, 60))
def test_as_many_clients_as_the_cap_leaves_room_for_count_alike(clients: int) -> None:
    """1 / 49 times 49 is below 1 in floating point."""
    tokens = list(range(1, clients + 1))
    found = shares(tokens, capped_weights(tokens, 1 / clients))
    assert found == pytest.approx([1 / clients] * clients)


def test_by_hand() -> None:
    assert capped_weights([80, 10, 10], 0.5) == [0.25, 1.0, 1.0]
    assert capped_weights([60, 60, 20, 10], 0.35) == pytest.approx([0.35 * 30 / 0.3 / 60] * 2 + [1.0, 1.0])


@pytest.mark.parametrize(("tokens", "cap"), [([9, 1], 0.4), ([5], 0.9), ([7, 0, 0], 0.5), ([3, 2, 1], 0.3)])
def test_a_cap_that_nobody_can_keep_is_refused(tokens: list[int], cap: float) -> None:
    clients = sum(n > 0 for n in tokens)
    with pytest.raises(BadInput, match=rf"weight_cap is {cap}, but {clients} clients have contributed"):
        capped_weights(tokens, cap)
