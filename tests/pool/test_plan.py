from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.tiny import config
from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.job import Job
from potluck.pool.plan import Plan, make_plan
from potluck.pool.ratio import MAX_LOCAL_DEVICES, apportion, parse_devices

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


def test_a_pipeline_by_ratio_cuts_the_chain_of_links() -> None:
    chosen = make_plan(job(devices="3:1", strategy="pipeline", data_stays=False), config("llama"))
    assert [device.links for device in chosen.devices] == [Ranges.of(0, 3), Ranges.of(3, 4)]
    assert counts(chosen) == {"heads": [9, 9], "columns": [26, 26], "vocab_rows": [0, 61]}
    assert chosen.micro_batch_size == 4  # of a batch of 16: two micro-batches a stage
    assert Plan.from_json(chosen.to_json()) == chosen
    even = make_plan(job(devices="4", strategy="pipeline-uniform", data_stays=False), config("llama"))
    assert [len(device.links or ()) for device in even.devices] == [1, 1, 1, 1]
    assert [device.links is not None and len(device.vocab_rows) for device in even.devices] == [0, 0, 0, 61]


def test_data_by_ratio_deals_rows_by_it() -> None:
    chosen = make_plan(job(devices="3:1", strategy="data", data_stays=False, micro_batch_size=2), config("llama"))
    assert [device.speed for device in chosen.devices] == [3.0, 1.0]
    assert counts(chosen) == {"heads": [9, 9], "columns": [26, 26], "vocab_rows": [61, 61]}
    assert chosen.micro_batch_size == 2
    assert Plan.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"devices": "1", "strategy": "pipeline"}, "'pipeline' is for several devices, but devices is '1'"),
        ({"devices": "1", "strategy": "data"}, "'data' is for several devices, but devices is '1'"),
        ({"devices": "5", "strategy": "pipeline"}, "5 stages need a link each, and the model has 4"),
        (
            {"devices": "30:1:1", "strategy": "pipeline"},
            "'30:1:1' gives device-1, device-2 none of the model's 4 links",
        ),
        ({"devices": "2:1", "strategy": "pipeline-uniform"}, "'pipeline-uniform' gives even stages"),
        ({"devices": "1:0:1", "strategy": "data"}, "'1:0:1' gives device-1 no rows"),
        ({"devices": "2", "strategy": "pipeline", "shares": {}}, "are not cut with strategy 'pipeline'"),
        ({"devices": "2", "strategy": "data", "shares": {"heads": [9, 0]}}, "are not cut with strategy 'data'"),
        (
            {"devices": "3", "strategy": "pipeline", "batch_size": 2},
            "3 stages of a pipeline need at least 3 micro-batches a step, and a step has 2 micro-batches of 1 row:",
        ),
        (
            {"devices": "2", "strategy": "pipeline-uniform", "micro_batch_size": 16},
            "2 stages of a pipeline need at least 2 micro-batches a step, and a step has 1 micro-batch of 16 rows:",
        ),
    ],
    ids=str,
)
def test_pipelines_and_rows_that_cannot_be_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        make_plan(job(**fields, data_stays=False), config("llama"))


WHOLE_ROWS = "norms whole rows of weights, and devices would each have a part of every row of o_proj and down_proj"


@pytest.mark.parametrize("fields", [{}, {"strategy": "tensor"}, {"strategy": "tensor-uniform"}, {"devices": "3:2:1"}])
def test_dora_of_rows_that_would_be_divided_is_refused(fields: dict[str, Any]) -> None:
    dora: dict[str, Any] = {"lora": {"use_dora": True}}
    cut = {"devices": "3", **fields}
    with pytest.raises(BadInput, match=rf"'tensor(-uniform)?' is not possible: .*{WHOLE_ROWS}\. Leave these out"):
        make_plan(job(**cut, **dora), config("llama"))
    some: dict[str, Any] = {"lora": {"use_dora": True, "targets": ["q_proj", "model.layers.1.mlp.down_proj"]}}
    with pytest.raises(BadInput, match=r"every row of down_proj\. Leave"):
        make_plan(job(**cut, **some), config("llama"))
    with pytest.raises(BadInput, match=r"every row of attn\.c_proj and mlp\.c_proj\. Leave"):
        make_plan(job(**cut, **dora), config("gpt2"))
    columns: dict[str, Any] = {"lora": {"use_dora": True, "targets": ["q_proj", "k_proj", "gate_proj"]}}
    for possible in (columns, {"train": "ia3"}, {"lora": {"use_rslora": True}}):
        assert len(make_plan(job(**cut, **possible), config("llama")).devices) == 3
    assert make_plan(job(devices="1", **dora), config("llama")).strategy == "single"
    for strategy in ("pipeline", "data"):
        assert make_plan(job(devices="2", strategy=strategy, data_stays=False, **dora), config("llama"))


@pytest.mark.parametrize(
    ("fields", "owners", "sentence"),
    [
        ({"strategy": "pipeline"}, None, "the labels of device-0's texts would go to device-1"),
        ({"strategy": "pipeline"}, ["device-1"], "the ids of device-1's texts would go to device-0"),
        (
            {"strategy": "pipeline-uniform", "devices": "3"},
            ["device-1"],
            "the ids of device-1's texts would go to device-0 and its labels to device-2",
        ),
        ({"strategy": "data"}, None, "rows of device-0 would go to device-1"),
        (
            {"strategy": "data", "devices": "3"},
            ["device-0", "device-2"],
            "rows of device-0 and device-2 would go to device-0, device-1 and device-2",
        ),
    ],
    ids=str,
)
def test_what_would_leave_is_said(fields: dict[str, Any], owners: list[str] | None, sentence: str) -> None:
    told = rf"strategy: '.*' is not possible: {sentence} \(data_stays: true forbids it; set data_stays: false\)"
    with pytest.raises(BadInput, match=told):
        make_plan(job(**{"devices": "2", **fields}), config("llama"), owners=owners)
