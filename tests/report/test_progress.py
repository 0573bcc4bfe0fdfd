"""What people see of a run, fed with the events of devices."""

import io

import pytest
from rich.console import Console

from potluck.chain.ranges import Ranges
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.result import DeviceResult, Evaluated, Result
from potluck.report.progress import Live, describe
from potluck.report.tables import plan_table, result_table

PLAN = Plan(
    "tensor",
    (
        DeviceShare("device-0", Ranges.of(0, 6), Ranges.of(0, 1024), Ranges.of(0, 40_000)),
        DeviceShare("device-1", Ranges.of(6, 9), Ranges.of(1024, 1536), Ranges.of(40_000, 49_152)),
        DeviceShare("device-2", Ranges(()), Ranges(()), Ranges(())),
    ),
)


def step(number: int, steps: int = 100, loss: float = 2.0) -> dict[str, object]:
    clocks = [{"compute_s": c, "wait_s": w, "transfer_s": 0.1} for c, w in ((0.3, 0.1), (0.2, 0.2), (0.0, 0.4))]
    return {
        "event": "step",
        "step": number,
        "steps": steps,
        "loss": loss,
        "tokens": 250,
        "step_s": 0.5,
        "devices": clocks,
    }


def shown(*, terminal: bool) -> tuple[io.StringIO, Live]:
    text = io.StringIO()
    return text, Live(Console(file=text, force_terminal=terminal, width=80))


def test_shares_of_the_time_and_tokens_per_second() -> None:
    assert describe([step(1, loss=3.0), step(2, loss=2.5)]) == (
        "loss 2.500  500 tokens/s  busy/waiting 60%/20% 40%/40% 0%/80%"
    )


def test_shares_of_the_time_are_of_the_devices_own() -> None:
    early = step(1) | {"devices": [{"compute_s": 0.3, "wait_s": 0.6, "transfer_s": 0.1}]}
    assert describe([early]).endswith("busy/waiting 30%/60%")


def test_the_plan_is_shown_once_every_device_has_loaded() -> None:
    text, live = shown(terminal=False)
    with live:
        live.planned(PLAN)
        live.event({"event": "loaded", "rank": 1, "weights_mib": 80.0})
        live.event({"event": "loaded", "rank": 0, "weights_mib": 300.0})
        assert "device-0" not in text.getvalue()
        live.event({"event": "loaded", "rank": 2, "weights_mib": 1_234.0})
    rows = {line.split()[1]: line for line in text.getvalue().splitlines() if "device-" in line}
    assert [part for part in rows["device-1"].split() if part.strip("│")][1:] == ["3", "512", "9,152", "80", "MiB"]
    assert [part for part in rows["device-2"].split() if part.strip("│")][1:] == ["0", "0", "0", "1,234", "MiB"]


def test_plain_lines_now_and_then_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("potluck.report.progress.time.monotonic", lambda: now)
    text, live = shown(terminal=False)
    with live:
        for number in range(1, 101):
            now += 0.01
            live.event(step(number))
    lines = text.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/100", *(f"{n}/100" for n in range(11, 101, 10)), "100/100"]
    assert lines[0].endswith("50 s left")
    assert "\x1b" not in text.getvalue()


def test_a_slow_run_says_something_every_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000.0
    monkeypatch.setattr("potluck.report.progress.time.monotonic", lambda: now)
    text, live = shown(terminal=False)
    with live:
        for number in range(1, 9):
            now += 3.0
            live.event(step(number, steps=1_000))
    assert [line.split()[1] for line in text.getvalue().splitlines()] == [f"{n}/1000" for n in (1, 3, 5, 7)]


def test_a_live_bar_on_a_terminal() -> None:
    text, live = shown(terminal=True)
    with live:
        live.scoring("before", 60, 120)
        live.scored("before", Evaluated(accuracy=0.25, loss=3.5))
        live.event({"event": "data", "examples": 2_134, "dropped": ["a.jsonl:7"], "cut": 2, "most": 1024, "steps": 100})
        live.event(step(40))
        live._screen.refresh()
        bar = text.getvalue()
        live.event({"event": "saving"})
    assert "Training" in bar
    assert "40/100" in bar
    assert "busy/waiting" in bar
    assert "accuracy 0.25, loss 3.500" in bar
    assert "1 examples were dropped" in bar
    assert "a.jsonl:7" in bar


def test_tables_do_not_divide_by_zero() -> None:
    devices = tuple(DeviceResult(f"device-{rank}", 0, 0, 0, 100.0, 0.0, 0.0, 0.0) for rank in range(2))
    result = Result("tensor", 0.1, 0.0, 1.0, 2.0, 1.0, None, None, "out", devices, ())
    console = Console(file=io.StringIO(), width=100)
    console.print(result_table(result), plan_table(PLAN, [1.0, 2.0, 3.0]))
    assert isinstance(console.file, io.StringIO)
    assert "0%" in console.file.getvalue()
