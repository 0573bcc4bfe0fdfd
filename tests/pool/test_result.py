import io
import json

import pytest

from potluck.chain.ranges import Ranges
from potluck.errors import PotluckError
from potluck.models.evaluate_classes import ClassScores
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.result import Evaluated, Tally

PLAN = Plan(
    "tensor",
    (
        DeviceShare("device-0", Ranges.of(0, 6), Ranges.of(0, 1024), Ranges.of(0, 40_000)),
        DeviceShare("device-1", Ranges.of(6, 9), Ranges.of(1024, 1536), Ranges.of(40_000, 49_152)),
    ),
)

NO_CLASSES = {"f1": None, "matthews": None, "pearson": None, "spearman": None}


def step(number: int, step_s: float, loss: float) -> dict[str, object]:
    clocks = [
        {"compute_s": step_s * 0.7, "wait_s": 0.0, "transfer_s": 0.1},
        {"compute_s": step_s * 0.2, "wait_s": step_s * 0.5, "transfer_s": 0.1},
    ]
    counted = {"tokens": 100, "owned_targets": [10 * number, 7]}
    return {"event": "step", "step": number, "loss": loss, "step_s": step_s, "devices": clocks, **counted}


def test_the_sum_of_a_run() -> None:
    metrics = io.StringIO()
    tally = Tally(metrics)
    for rank, examples in ((1, 20), (0, 50)):
        tally.event({"event": "data", "rank": rank, "examples": examples})
    for event in (step(1, 4.0, 3.0), step(2, 1.0, 2.0), step(3, 1.0, 1.5)):
        tally.event({"event": "loaded", "rank": 0})
        tally.event(event)
    tally.event({"event": "finished", "rank": 1, "peak_rss_mib": 512.5})
    before, after = Evaluated(0.0, 4.0), Evaluated(0.75, 1.0)
    tally.scored(before, after)
    result = tally.result(PLAN, "out/adapter", before=before, after=after, predicted_step_s=0.9).to_json()

    assert json.loads(json.dumps(result)) == {
        "strategy": "tensor",
        "step_s": 1.0,
        "idle_ratio": pytest.approx(0.25),
        "tokens_per_s": pytest.approx(50.0),
        "loss_first": 3.0,
        "loss_last": 1.5,
        "eval_before": {"accuracy": 0.0, "loss": 4.0, **NO_CLASSES},
        "eval_after": {"accuracy": 0.75, "loss": 1.0, **NO_CLASSES},
        "adapter": "out/adapter",
        "predicted_step_s": 0.9,
        "prediction_error": pytest.approx(-0.1),
        "owners": [
            {"name": "device-0", "examples": 50, "target_tokens": 60},
            {"name": "device-1", "examples": 20, "target_tokens": 21},
        ],
        "devices": [
            {
                "name": "device-0",
                "heads": 6,
                "columns": 1024,
                "vocab_rows": 40_000,
                "peak_rss_mib": 0.0,
                "compute_s": pytest.approx(4.2),
                "wait_s": 0.0,
                "transfer_s": pytest.approx(0.3),
                "links": None,
                "speed": 0.0,
            },
            {
                "name": "device-1",
                "heads": 3,
                "columns": 512,
                "vocab_rows": 9_152,
                "peak_rss_mib": 512.5,
                "compute_s": pytest.approx(1.2),
                "wait_s": pytest.approx(3.0),
                "transfer_s": pytest.approx(0.3),
                "links": None,
                "speed": 0.0,
            },
        ],
    }
    lines = [json.loads(line) for line in metrics.getvalue().splitlines()]
    assert [line["event"] for line in lines] == ["step", "step", "step", "eval"]
    assert lines[1]["loss"] == 2.0
    assert lines[3]["after"] == {"accuracy": 0.75, "loss": 1.0, **NO_CLASSES}


def test_scores_of_a_new_classifier_are_those_after() -> None:
    metrics = io.StringIO()
    scores = ClassScores(0.25, accuracy=0.9, f1=0.8, matthews=0.7, pearson=None, spearman=None, examples=10)
    Tally(metrics).scored(None, Evaluated.of(scores))
    line = json.loads(metrics.getvalue())
    after = {"loss": 0.25, "accuracy": 0.9, "f1": 0.8, "matthews": 0.7, "pearson": None, "spearman": None}
    assert line == {"event": "eval", "before": None, "after": after}


def test_stages_and_speeds_are_told() -> None:
    whole = (Ranges.of(0, 9), Ranges.of(0, 1536))
    stages = (
        DeviceShare("a", *whole, Ranges.of(0, 49_152), links=Ranges.of(5, 8)),
        DeviceShare("b", *whole, Ranges(()), links=Ranges.of(0, 5)),
    )
    walkers = tuple(
        DeviceShare(name, *whole, Ranges.of(0, 49_152), speed=speed) for name, speed in (("a", 2), ("b", 1))
    )
    told = []
    for plan in (Plan("pipeline", stages), Plan("data", walkers)):
        tally = Tally(io.StringIO())
        tally.event(step(1, 1.0, 3.0))
        told.append(
            [(d["links"], d["speed"]) for d in json.loads(json.dumps(tally.result(plan, "").to_json()))["devices"]]
        )
    assert told == [[([5, 8], 0.0), ([0, 5], 0.0)], [(None, 2), (None, 1)]]


def test_a_run_without_a_step_is_an_error() -> None:
    with pytest.raises(PotluckError, match="without a single step"):
        Tally(io.StringIO()).result(PLAN, "out", before=None, after=None)
