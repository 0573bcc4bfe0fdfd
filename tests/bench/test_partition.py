import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.bench.partition import partition
from potluck.errors import BadInput

LABELS = st.lists(st.sampled_from("abcdefgh"), min_size=8, max_size=80)
KINDS = st.one_of(
    st.just("iid"), st.floats(0.01, 100, allow_nan=False).map(lambda alpha: f"dirichlet:{alpha:.3f}"), st.just("topic")
)


@given(labels=LABELS, clients=st.integers(1, 8), kind=KINDS, seed=st.integers(0, 2**32))
def test_every_example_is_on_exactly_one_client_and_no_client_is_empty(labels, clients, kind, seed):
    if kind == "topic" and len(set(labels)) < clients:
        with pytest.raises(BadInput, match=f"{len(set(labels))} labels are too few for {clients} clients"):
            partition(labels, clients, kind, seed)
        return
    parts = partition(labels, clients, kind, seed)
    assert len(parts) == clients
    assert sorted(index for part in parts for index in part) == list(range(len(labels)))
    assert all(parts)
    assert parts == partition(labels, clients, kind, seed)


@given(labels=LABELS, clients=st.integers(1, 5), seed=st.integers(0, 1000))
def test_topic_keeps_each_label_on_one_client(labels, clients, seed):
    if len(set(labels)) < clients:
        return
    parts = partition(labels, clients, "topic", seed)
    held = [{labels[index] for index in part} for part in parts]
    assert sum(map(len, held)) == len(set(labels))
    # Largest first, each to the smallest so far: no client is ahead of another by more than one label.
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= max(labels.count(label) for label in labels)


@given(count=st.integers(1, 100), clients=st.integers(1, 10), seed=st.integers(0, 1000))
def test_iid_is_even(count, clients, seed):
    if count < clients:
        return
    sizes = [len(part) for part in partition(["same"] * count, clients, "iid", seed)]
    assert max(sizes) - min(sizes) <= 1


def test_a_small_alpha_concentrates_labels_and_a_large_one_spreads_them():
    labels = [label for label in "abcdef" for _ in range(100)]

    def largest_share(kind):
        parts = partition(labels, 3, kind, 0)
        return sum(max(sum(labels[i] == label for i in part) for part in parts) for label in "abcdef") / len(labels)

    assert largest_share("dirichlet:0.05") > 0.85
    assert largest_share("dirichlet:0.8") > largest_share("dirichlet:1000")
    assert largest_share("dirichlet:1000") < 0.4


def test_another_seed_gives_another_division():
    labels = list("abcdefgh") * 10
    for kind in ("iid", "dirichlet:0.8", "topic"):
        assert len({str(partition(labels, 3, kind, seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("kind", ["even", "iid:3", "dirichlet", "dirichlet:", "dirichlet:0", "dirichlet:nan", "dirichlet:inf", "topic:2"])  # fmt: skip # noqa: E501
def test_what_is_not_a_division_is_said(kind):
    with pytest.raises(BadInput, match=kind):
        partition(["a", "b", "c"], 2, kind, 0)


def test_more_clients_than_examples():
    with pytest.raises(BadInput, match="2 examples are too few for 3 clients"):
        partition(["a", "b"], 3, "iid", 0)
    with pytest.raises(BadInput, match="0 clients"):
        partition(["a"], 0, "iid", 0)
