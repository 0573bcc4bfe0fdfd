"""Tables and JSON of plans that are possible, and of one that is not."""

from dataclasses import replace

from rich.console import Console

from potluck.chain.ranges import Ranges
from potluck.pool.candidates import Candidate
from potluck.pool.cost import DevicePrediction, Prediction
from potluck.pool.plan import DeviceShare, Plan
from potluck.report.plans import candidates_table, impossible, plans_json, predicted_table
from potluck.report.tables import plan_table

HUB = DeviceShare("hub", Ranges.of(0, 5), Ranges.of(0, 900), Ranges.of(0, 30000))
CAM = DeviceShare("cam", Ranges.of(5, 9), Ranges.of(900, 1536), Ranges.of(30000, 49152))
DEVICES = (
    DevicePrediction("hub", 1.7, 0.0, 1 << 30, 2 << 30, 4.2e6),
    DevicePrediction("cam", 1.5, 0.2, 3 << 28, 1 << 30, 1e9),
)
PREDICTED = Prediction(step_s=2.0, idle_ratio=0.05, message_s=0.3, devices=DEVICES)
TENSOR = Candidate("tensor", True, "because", Plan("tensor", (HUB, CAM)), PREDICTED, proven=False)
SINGLE = Candidate("single", False, "1.20 GiB are missing on hub.")
STAGES = Plan(
    "pipeline",
    (replace(HUB, links=Ranges.of(7, 60)), replace(CAM, vocab_rows=Ranges(()), links=Ranges.of(0, 7))),
    micro_batch_size=2,
)
PIPELINE = Candidate("pipeline", False, "the ids of hub's texts would go to cam.", STAGES, PREDICTED, moves_data=True)
ROWS = Plan("data", (replace(HUB, speed=4.0), replace(CAM, speed=1.0)))
DATA = Candidate("data", True, "", ROWS, PREDICTED, moves_data=True)


def shown(*tables: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def test_tables_say_what_is_possible_and_who_would_hold_what() -> None:
    plans = shown(candidates_table([SINGLE, TENSOR], TENSOR))
    assert next(line for line in plans.splitlines() if line.startswith("single")).split() == [
        "single",
        *"││││││",
        "no",
        "│",
        "no",
    ]
    assert impossible([SINGLE, TENSOR]) == ["single is not possible: 1.20 GiB are missing on hub."]
    assert "best*" in plans
    assert "* The search was cut short" in plans
    assert "*" not in shown(candidates_table([SINGLE, DATA], DATA))
    assert "1,024 │ 1,000" in plans
    shares = shown(predicted_table(TENSOR))
    for part in ("hub", "900", "30,000", "768 MiB", "1.50 s", "0.20 s"):
        assert part in shares


def test_tables_fit_into_80_columns_and_cut_nothing() -> None:
    three = (HUB, CAM, DeviceShare("raspberry", Ranges(()), Ranges(()), Ranges(())))
    waits = DevicePrediction("raspberry", 0.0, 130.0, 6_144 << 20, 6_600 << 20)
    predicted = Prediction(130.0, 0.4, 0.3, (*DEVICES, waits))
    alone = Prediction(131.0, 0.0, 0.0, DEVICES[:1])
    uniform = Candidate("tensor-uniform", True, "", Plan("tensor-uniform", three), predicted)
    single = Candidate("single", False, "the data of cam would have to move to hub.", Plan("single", (HUB,)), alone)
    text = shown(candidates_table([single, TENSOR, uniform], TENSOR), predicted_table(uniform), width=80)
    for whole in (
        "tensor-uniform",
        "hub, cam",
        "3 devices",
        "65.0x",
        "raspberry",
        "6,144",
        "6,144 MiB",
        "93%",
        "compute",
    ):
        assert whole in text
    assert "…" not in text
    assert impossible([single]) == ["single on hub is not possible: the data of cam would have to move to hub."]
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80
    wide = shown(candidates_table([single, PIPELINE, TENSOR, uniform], TENSOR), width=80)
    assert "…" not in wide


def test_reasons_that_several_have_are_said_once() -> None:
    alone = [Candidate(name, False, "there is one device only.") for name in ("tensor", "pipeline", "data")]
    assert impossible([*alone, SINGLE]) == [
        "tensor, pipeline, data are not possible: there is one device only.",
        "single is not possible: 1.20 GiB are missing on hub.",
    ]


def test_who_would_see_data_and_what_it_would_bring() -> None:
    lines = shown(candidates_table([PIPELINE, DATA, TENSOR], TENSOR), width=80).splitlines()
    pipeline, data, tensor = (
        next(line for line in lines if line.startswith(f"{s} ")) for s in ("pipeline", "data", "tensor")
    )
    assert pipeline.split("│")[2].strip() == "2.00 s"
    assert [each.split("│")[6].strip() for each in (pipeline, data, tensor)] == ["yes", "yes", "no"]
    assert [each.split("│")[7].strip() for each in (pipeline, data, tensor)] == ["no", "+0%", "best*"]


def test_stages_are_shown_in_blocks_and_rows_in_parts() -> None:
    stages = shown(predicted_table(PIPELINE), plan_table(STAGES, [100.0, 50.0]))
    for part in ("0 to 3.5", "3.5 to 30", "whole", "blocks"):
        assert stages.count(part) == 2
    assert "columns" not in stages
    rows = shown(predicted_table(DATA), plan_table(ROWS, [100.0, 50.0]))
    assert rows.count("80%") == 2
    assert rows.count("20%") == 2
    own = Plan("data", (HUB, CAM))
    assert shown(plan_table(own, [1.0, 1.0])).count("its own") == 2


def test_json_of_stages() -> None:
    pipeline = plans_json([PIPELINE, TENSOR], TENSOR, None, [])["plans"][0]
    assert (pipeline["moves_data"], pipeline["micro_batch_size"], pipeline["feasible"]) == (True, 2, False)
    assert [device["links"] for device in pipeline["devices"]] == [[7, 60], [0, 7]]
    assert [device["bytes_sent"] for device in pipeline["devices"]] == [4_200_000, 1_000_000_000]


def test_json_is_null_where_nothing_fits() -> None:
    content = plans_json([SINGLE, TENSOR], TENSOR, None, ["assumed"])
    assert (content["best"], content["notes"]) == ("tensor", ["assumed"])
    single, tensor = content["plans"]
    assert (single["feasible"], single["step_s"], single["devices"]) == (False, None, [])
    assert [d["heads"] for d in tensor["devices"]] == [5, 4]
    assert tensor["devices"][1] == {
        "name": "cam",
        "heads": 4,
        "columns": 636,
        "vocab_rows": 19152,
        "memory_mib": 768.0,
        "compute_s": 1.5,
        "wait_s": 0.2,
        "bytes_sent": 1_000_000_000,
        "links": None,
        "speed": 0.0,
    }
    assert (tensor["moves_data"], tensor["micro_batch_size"]) == (False, None)
