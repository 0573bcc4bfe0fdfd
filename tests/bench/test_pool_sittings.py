from hypothesis import given
from hypothesis import strategies as st

from potluck.bench.pool_sittings import arrange


@given(st.lists(st.floats(0.1, 12.0), min_size=1, max_size=9), st.floats(1.0, 30.0))
def test_each_runs_within_memory_or_is_left_out_with_its_size(sizes: list[float], available: float) -> None:
    needed = {f"s{i}": size * 2**30 for i, size in enumerate(sizes)}
    found = arrange(needed, available * 2**30)
    for together in found.together:
        assert len(set(together)) == len(together)
        assert sum(needed[name] for name in together) <= 0.9 * available * 2**30 * (1 + 1e-9)
    ran = {name for together in found.together for name in together}
    assert ran.isdisjoint(found.left_out)
    assert ran | found.left_out.keys() == needed.keys()
    assert all(needed[name] > 0.9 * available * 2**30 for name in found.left_out)
    for name in found.left_out:
        assert f"{needed[name] / 2**30:.1f} GiB" in found.left_out[name]
    if "s0" in ran:
        for together in found.together:
            if "s0" not in together:  # then there is no room for the first beside the largest of it
                assert needed["s0"] + max(needed[name] for name in together) > 0.9 * available * 2**30 * (1 - 1e-9)


def test_all_run_together_where_there_is_room() -> None:
    assert arrange({"a": 1.0, "b": 2.0, "c": 3.0}, 100.0).together == (("a", "b", "c"),)


def test_others_run_a_few_at_a_time_beside_the_first() -> None:
    found = arrange({"a": 4.0, "b": 4.0, "c": 4.0, "d": 8.0, "e": 20.0}, 10.0)
    assert found.together == (("a", "b"), ("a", "c"), ("d",))
    assert list(found.left_out) == ["e"]
