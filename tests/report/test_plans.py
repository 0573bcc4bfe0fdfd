"""Tables and JSON of plans that are possible, and of one that is not."""

from rich.console import Console

from potluck.chain.ranges import Ranges
from potluck.pool.candidates import Candidate
from potluck.pool.cost import DevicePrediction, Prediction
from potluck.pool.plan import DeviceShare, Plan
from potluck.report.plans import candidates_table, impossible, plans_json, predicted_table

HUB = DeviceShare("hub", Ranges.of(0, 5), Ranges.of(0, 900), Ranges.of(0, 30000))
CAM = DeviceShare("cam", Ranges.of(5, 9), Ranges.of(900, 1536), Ranges.of(30000, 49152))
DEVICES = (DevicePrediction("hub", 1.7, 0.0, 1 << 30, 2 << 30), DevicePrediction("cam", 1.5, 0.2, 3 << 28, 1 << 30))
PREDICTED = Prediction(step_s=2.0, idle_ratio=0.05, message_s=0.3, devices=DEVICES)
TENSOR = Candidate("tensor", True, "because", Plan("tensor", (HUB, CAM)), PREDICTED, proven=False)
SINGLE = Candidate("single", False, "1.20 GiB are missing on hub.")


def shown(*tables: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        for table in tables:
            console.print(table)
    return capture.get()


def test_tables_say_what_is_possible_and_who_would_hold_what() -> None:
    plans = shown(candidates_table([SINGLE, TENSOR], TENSOR))
    assert "│ no " in plans
    assert impossible([SINGLE, TENSOR]) == ["single is not possible: 1.20 GiB are missing on hub."]
    assert "best (search was cut short)" in plans
    assert "1,024 MiB" in plans
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
    for whole in ("tensor-uniform", "hub, cam", "3 devices", "65.0x", "raspberry", "6,144 MiB", "93%", "compute"):
        assert whole in text
    assert "…" not in text
    assert impossible([single]) == ["single on hub is not possible: the data of cam would have to move to hub."]


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
    }
