from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.tiny import config
from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.job import Job
from potluck.pool.plan import MAX_LOCAL_DEVICES, Plan, apportion, make_plan, parse_devices

RATIOS = st.lists(st.integers(0, 1000), min_size=1, max_size=12).filter(any)


def job(**fields: Any) -> Job:
    return Job.model_validate({"model": "m", "data": {"train": "d"}, "output": "o", **fields})


def counts(plan: Plan) -> dict[str, list[int]]:
    return {
        unit: [len(getattr(device, unit)) for device in plan.devices] for unit in ("heads", "columns", "vocab_rows")
    }


@given(st.integers(0, 300_000), RATIOS)
def test_apportioned_units_add_up_and_lie_within_one_of_the_ratio(total: int, ratio: list[int]) -> None:
    units = apportion(total, ratio)
    assert sum(units) == total
    exact = [Fraction(total * part, sum(ratio)) for part in ratio]
    assert all(int(e) <= u <= int(e) + 1 for e, u in zip(exact, units, strict=True))
    rounded_up = [(e - int(e), part) for e, u, part in zip(exact, units, ratio, strict=True) if u > e]
    rounded_down = [(e - int(e), part) for e, u, part in zip(exact, units, ratio, strict=True) if u <= e]
    assert not rounded_up or not rounded_down or min(rounded_up) >= max(rounded_down)


@given(st.integers(0, 1000), st.integers(1, 12))
def test_even_parts_give_the_remainder_to_the_first(total: int, devices: int) -> None:
    units = apportion(total, [1.0] * devices)
    assert units == sorted(units, reverse=True)
    assert units[0] - units[-1] <= 1


@given(
    st.integers(1, 300_000),
    st.lists(st.floats(0, 1e307), min_size=1, max_size=6).filter(lambda parts: sum(parts) > 0),
)
def test_any_usable_ratio_adds_up(total: int, ratio: list[float]) -> None:
    units = apportion(total, ratio)
    assert sum(units) == total
    assert min(units) >= 0
    assert all(u == 0 or part > 0 for u, part in zip(units, ratio, strict=True))


@pytest.mark.parametrize(
    ("total", "ratio", "units"),
    [
        (9, [3, 2, 1], [5, 3, 1]),  # 4.5, 3, 1.5: the tie goes to the larger part
        (9, [1, 2, 3], [1, 3, 5]),
        (3, [1, 1], [2, 1]),
        (1, [1, 0, 1], [1, 0, 0]),
        (4, [1, 1, 1, 1], [1, 1, 1, 1]),
        (2, [100, 1, 1], [2, 0, 0]),
    ],
)
def test_known_shares(total: int, ratio: list[float], units: list[int]) -> None:
    assert apportion(total, ratio) == units


@pytest.mark.parametrize(
    ("devices", "parts"), [("1", [1.0]), ("3", [1.0] * 3), ("3:2:1", [3.0, 2.0, 1.0]), ("1.42:1:0", [1.42, 1.0, 0.0])]
)
def test_devices_as_a_number_or_a_ratio(devices: str, parts: list[float]) -> None:
    assert parse_devices(devices) == parts


@pytest.mark.parametrize(
    "devices",
    [
        *("", "0", "-1", "-3", "2.5", "65", "1000000000000", "inf", "nan", "1e400", "three"),
        *("3:", ":", "3:-1", "0:0", "inf:1", "nan:1", "3;2", "1e308:1e308", ":".join(["1"] * 65)),
    ],
)
def test_devices_that_are_neither_are_told_what_is_expected(devices: str) -> None:
    with pytest.raises(BadInput, match=f"neither a number of devices from 1 to {MAX_LOCAL_DEVICES}, such as 3"):
        parse_devices(devices)


def test_a_ratio_cuts_heads_columns_and_rows_each_for_itself() -> None:
    plan = make_plan(job(devices="3:2:1"), config("llama"))
    assert plan.strategy == "tensor"
    assert counts(plan) == {"heads": [5, 3, 1], "columns": [13, 9, 4], "vocab_rows": [31, 20, 10]}
    assert plan.devices[1].heads == Ranges.of(5, 8)
    assert [device.name for device in plan.devices] == ["device-0", "device-1", "device-2"]
    assert Plan.from_json(plan.to_json()) == plan


def test_lists_by_hand_win_and_the_others_follow_the_ratio() -> None:
    plan = make_plan(job(devices="2:1", shares={"heads": [0, 9]}), config("llama"))
    assert counts(plan) == {"heads": [0, 9], "columns": [17, 9], "vocab_rows": [41, 20]}
    assert plan.devices[0].heads == Ranges(())
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(("devices", "strategy"), [("1", "single"), ("2", "tensor")])
def test_auto_is_single_only_alone(devices: str, strategy: str) -> None:
    assert make_plan(job(devices=devices), config("llama")).strategy == strategy


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"devices": "3", "shares": {"heads": [5, 4]}}, r"shares\.heads: 2 numbers \(5, 4\) for 3 devices"),
        (
            {"devices": "3", "shares": {"heads": [5, 3, 2]}},
            r"shares\.heads: 5, 3, 2 make 10, but the model has 9 query heads",
        ),
        ({"devices": "2", "shares": {"columns": [26, 1]}}, r"make 27, but the model has 26 MLP columns"),
        ({"devices": "2", "shares": {"vocab_rows": [1, 1]}}, r"make 2, but the model has 61 vocabulary rows"),
        ({"devices": "2", "strategy": "single"}, r"'single' runs on one device, but devices is '2'"),
        ({"devices": "2:1", "strategy": "tensor-uniform"}, r"'tensor-uniform' gives even shares"),
        ({"devices": "2", "strategy": "tensor-uniform", "shares": {}}, r"'tensor-uniform' gives even shares"),
        ({"devices": "0:1:0"}, r"Every share goes to device-1: train there alone, with 'strategy: single'"),
    ],
    ids=str,
)
def test_shares_that_do_not_fit_are_refused_in_words(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        make_plan(job(**fields), config("llama"))


def test_more_devices_than_heads_leave_some_without() -> None:
    plan = make_plan(job(devices="12", strategy="tensor-uniform"), config("llama"))
    assert counts(plan)["heads"] == [1] * 9 + [0] * 3
