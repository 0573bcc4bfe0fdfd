import io
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from recorded_pool import entry, result, step
from rich.console import Console

from potluck.bench.pool_picture import draw
from potluck.bench.pool_result import ratio_of, ratios_of, recovered, row_of
from potluck.bench.pool_table import pool_table, ratio_table, sentences
from potluck.errors import BadInput


def printed(*shown: Any) -> str:
    console = Console(width=80, file=io.StringIO())
    for each in shown:
        console.print(each)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def words_of(svg: Path) -> list[str]:
    """matplotlib writes each text as a comment before its glyphs."""
    builder = ElementTree.TreeBuilder(insert_comments=True)
    tree = ElementTree.fromstring(svg.read_text(), parser=ElementTree.XMLParser(target=builder))
    return [(node.text or "").strip() for node in tree.iter() if node.tag is ElementTree.Comment]


def test_a_row_has_medians_over_steps_and_extremes_over_devices() -> None:
    steps = [step(2.0, number=1), step(4.0, number=2), step(2.5, number=3)]
    row = row_of(entry("tensor", predicted_s=2.0), steps, tokens=1000)
    assert (row["step_s"], row["step_s_min"], row["step_s_max"]) == (2.5, 2.0, 4.0)
    assert row["tokens_per_s"] == 400
    assert row["prediction_error"] == pytest.approx(-0.2)
    assert row["idle_ratio"] == pytest.approx(0.4 / (2 * 2.5))
    assert row["bytes_per_device"] == 2 * 10**6
    assert row["peak_rss_mib"] == 401.0
    assert row["context_switches"] == 125
    assert row["stall_ratio"] is None
    assert [device["name"] for device in row["devices"]] == ["device-0", "device-1"]
    assert row["devices"][0]["wait_s"] == 0.4
    assert row["devices"][1]["speed"] == pytest.approx(0.5)
    assert (row["half_batches"], row["wire"]) == (2, "bf16")
    json.dumps(row)


def test_rows_of_other_strategies_say_what_each_device_does() -> None:
    piped = row_of(entry("pipeline", "pipeline", micro_batch_size=2), [step(2.0)], 10)
    assert [device["links"] for device in piped["devices"]] == [((0, 3),), ((3, 8),)]
    assert piped["half_batches"] == 1
    dealt = row_of(entry("data", "data"), [step(2.0)], 10)
    assert [device["rows_part"] for device in dealt["devices"]] == [0.75, 0.25]
    assert dealt["wire"] == "fp32", "gradients travel as they are"


def test_stalls_are_averaged_where_they_are_counted() -> None:
    assert row_of(entry("tensor"), [step(2.0, stall=0.2), step(2.0, stall=0.4)], 10)["stall_ratio"] == pytest.approx(
        0.3
    )


def test_a_ratio_is_that_of_steps_taken_in_turn() -> None:
    # the machine became twice as slow between the rounds; medians alone would say 1.5 / 3
    steps = {
        "tensor": [step(1.0, number=1), step(2.0, number=2)],
        "pipeline": [step(2.0, number=1), step(4.0, number=2)],
    }
    ratio = ratio_of(steps, "tensor", "pipeline", "tensor")
    assert ratio is not None
    assert (ratio["ratio"], ratio["min"], ratio["max"], ratio["pairs"]) == (0.5, 0.5, 0.5, 2)
    assert ratio_of(steps, "tensor", "data", "tensor") is None


def test_what_did_not_fit_together_is_compared_through_the_first() -> None:
    steps = {
        "tensor": [step(1.0, sitting=0), step(3.0, sitting=1)],
        "tensor-uniform": [step(2.0, sitting=0)],
        "pipeline": [step(12.0, sitting=1)],
    }
    ratio = ratio_of(steps, "tensor-uniform", "pipeline", "tensor")
    assert ratio is not None
    assert ratio["ratio"] == pytest.approx(2.0 / 4.0)
    assert ratio["pairs"] == 0


def test_auto_is_compared_by_the_row_it_chose() -> None:
    steps = {"tensor": [step(1.0)], "pipeline": [step(2.0)]}
    found = {each["strategy"]: each for each in ratios_of(steps, {"data_stays": "tensor", "data_moves": "pipeline"})}
    assert found["auto, data_stays (tensor)"]["ratio"] == 0.5
    assert found["auto, data_moves (pipeline)"]["ratio"] == 1.0


def test_what_was_recovered_of_the_gap() -> None:
    def row(name: str, step_s: float, predicted_s: float = 0.0) -> dict[str, Any]:
        return {"strategy": name, "step_s": step_s, "predicted_step_s": predicted_s}

    found = recovered([row("tensor", 8.5), row("tensor-uniform", 10.0), row("optimum", 8.0, predicted_s=7.0)])
    assert found == {"measured": pytest.approx(0.75), "computed": pytest.approx(0.5)}
    none = recovered([row("tensor", 8.5), row("tensor-uniform", 8.0), row("optimum", 8.2, predicted_s=8.1)])
    assert none == {"measured": None, "computed": None}
    assert recovered([row("tensor", 1.0)]) is None


def all_rows() -> list[dict[str, Any]]:
    strategies = ("tensor", "tensor-uniform-sync", "pipeline", "data")
    plans = {name: {"micro_batch_size": 2} if name == "pipeline" else {} for name in strategies}
    return [
        row_of(entry(name, name.removesuffix("-uniform-sync"), **plans[name]), [step(14.45), step(16.44)], 1024)
        for name in strategies
    ]


@pytest.mark.parametrize("stall", [None, 0.25])
def test_tables_say_all_within_80_columns(stall: float | None) -> None:
    rows = [{**row, "stall_ratio": stall} for row in all_rows()]
    shown = printed(pool_table(result(rows)))
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    for said in ("tensor-uniform-sync", "2 halves, bf16", "2 rows, bf16", "15.4", "14.4-16.4", "-87.1%", "2.00", "401"):
        assert said in shown
    assert ("25%" in shown) == (stall is not None)
    ratio = {"strategy": "tensor", "against": "pipeline", "ratio": 0.75, "min": 0.7, "max": 0.8, "pairs": 6}
    apart = {**ratio, "against": "data", "min": None, "max": None}
    shown = printed(ratio_table(result(rows, ratios=[ratio, apart])))
    assert "-25.0%" in shown
    assert "-30.0% to -20.0%" in shown
    assert "not in turn" in shown


def test_sentences_say_what_was_reached_and_what_was_left_out() -> None:
    said = "\n".join(sentences(result(all_rows())))
    assert "tensor reaches 10% of that" in said
    assert "gains 91% as that ran, - as it was computed" in said
    assert "data was left out: it does not fit." in said
    assert "auto, data may move: pipeline." in said
    assert "not slowed" in said


def test_a_picture_has_a_bar_a_device(tmp_path: Path) -> None:
    draw(result(all_rows()), tmp_path / "new" / "pool.svg")
    words = words_of(tmp_path / "new" / "pool.svg")
    assert words.count("device-0") == words.count("device-1") == 4
    for said in ("compute", "wait", "transfer", "llama-1b, lora, devices 1.5:1"):
        assert said in words
    with pytest.raises(BadInput, match=r"must end in \.png or \.svg"):
        draw(result(all_rows()), tmp_path / "pool.pdf")
    with pytest.raises(BadInput, match="nothing to draw"):
        draw(result([]), tmp_path / "pool.svg")
