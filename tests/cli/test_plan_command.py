"""``potluck plan`` as a person types it."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from pool.profiles import profile
from potluck.cli import plan
from potluck.errors import BadInput
from potluck.pool.profile import Link, write_profile

APP = typer.Typer()
APP.command("plan")(plan.command)
APP.command("other")(lambda: None)
QUICK = Link(latency_s=2e-5, bytes_per_s=2e9)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("job.yaml").write_text("model: not-here\ndata: {train: not-here.jsonl}\noutput: out\nbatch_size: 4\n")
    write_profile(profile("hub", speed=1.9, link=QUICK), Path("hub.json"))
    write_profile(profile("cam-1", link=QUICK), Path("cam.json"))
    return tmp_path


def ran(*arguments: str) -> str:
    result = CliRunner().invoke(APP, ["plan", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def answer(*arguments: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(ran(*arguments, "--json").splitlines()[-1])
    return content


def test_json_has_every_strategy_with_its_devices(files: Path) -> None:
    said = answer("job.yaml", "--profiles", "hub.json", "cam.json")
    assert said["best"] == "tensor"
    strategies = ["single", "tensor", "tensor-uniform", "pipeline", "pipeline-uniform", "data"]
    assert [p["strategy"] for p in said["plans"]] == strategies
    assert [p["moves_data"] for p in said["plans"]] == [False, False, False, True, True, True]
    assert all(device["bytes_sent"] > 0 for p in said["plans"][1:] for device in p["devices"])
    assert [d["links"] for d in said["plans"][4]["devices"]] == [[0, 30], [30, 60]]
    assert not any(p["feasible"] for p in said["plans"][3:]), "data stay"
    said["plans"] = said["plans"][:3]
    for each in said["plans"]:
        assert {"strategy", "feasible", "reason", "step_s", "idle_ratio", "devices"} <= set(each)
        assert sum(device["heads"] for device in each["devices"]) == 9
        assert sum(device["columns"] for device in each["devices"]) == 1536
        assert sum(device["vocab_rows"] for device in each["devices"]) == 49152
        assert all(device["memory_mib"] > 500 and device["compute_s"] > 0 for device in each["devices"])
    assert [device["name"] for device in said["plans"][1]["devices"]] == ["hub", "cam-1"]
    assert min(p["step_s"] for p in said["plans"]) == said["plans"][1]["step_s"]
    assert not (files / "out").exists()


def test_profiles_can_be_repeated_and_the_first_is_the_coordinator(files: Path) -> None:
    for arguments in (
        ["--profiles", "cam.json", "--profiles", "hub.json"],
        ["--profiles", "cam.json", "hub.json"],
        ["cam.json", "hub.json"],
    ):
        said = answer("job.yaml", *arguments)
        assert [device["name"] for device in said["plans"][1]["devices"]] == ["cam-1", "hub"]


def test_another_device_of_the_same_kind_and_a_slower_link(files: Path) -> None:
    two = answer("job.yaml", "--profiles", "hub.json", "cam.json")
    three = answer("job.yaml", "--profiles", "hub.json", "cam.json", "cam.json")
    assert {d["name"] for d in three["plans"][2]["devices"]} == {"hub", "cam-1-1", "cam-1-2"}
    assert three["plans"][1]["step_s"] < two["plans"][1]["step_s"]
    slow = answer("job.yaml", "--profiles", "hub.json", "cam.json", "--link", "10mbit", "--latency", "5ms")
    assert slow["best"] == "single"
    assert slow["plans"][1]["step_s"] > two["plans"][1]["step_s"]


def test_people_read_a_table_the_shares_and_why(files: Path) -> None:
    shown = ran("job.yaml", "--profiles", "hub.json", "cam.json", "--link", "10gbit", "--latency", "20us")
    for part in ("tensor-uniform", "hub, cam-1", "best", "vocab", "Links: 10,000 Mbit/s and 0.02 ms a message"):
        assert part in shown
    assert "hub computes 1.9x as fast as cam-1" in shown


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["job.yaml"], "Name at least one profile"),
        (["job.yaml", "--profiles", "none.json"], "There is no profile at none.json"),
        (["job.yaml", "--profiles", "job.yaml"], "job.yaml cannot be read as a profile"),
        (["none.yaml", "--profiles", "hub.json"], "There is no job file at none.yaml"),
        (["job.yaml", "--profiles", "hub.json", "--link", "warp"], "--link: 'warp' is no rate"),
    ],
)
def test_what_cannot_be_used_is_said(files: Path, arguments: list[str], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        ran(*arguments)
