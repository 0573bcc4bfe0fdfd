"""``potluck bench pool`` as a person runs it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from potluck import testbed
from potluck.bench.pool import Comparison, compare
from potluck.bench.pool_plans import STRATEGIES
from potluck.errors import BadInput, PotluckError
from potluck.testbed.state import state_file

PREFIX = "ptestbench"
SMALL = (
    *("--shape", "smollm2-135m", "--layers", "2", "--rows", "4", "--length", "16", "--steps", "1"),
    *("--prefix", PREFIX),
)


def refused(**differs: Any) -> str:
    fields: dict[str, Any] = {"shape": "smollm2-135m", "layers": 1, "load": 0.5, "prefix": PREFIX}
    with pytest.raises(BadInput) as error:
        compare(Comparison(**fields | differs))
    return str(error.value)


def test_what_cannot_be_compared_is_refused_before_anything_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "up", lambda *_, **__: pytest.fail("a testbed was made"))
    assert "there are A (1.42:1:1)" in refused(set="Z")
    assert "there are smollm2-135m" in refused(shape="huge")
    assert "1 to 30 blocks" in refused(layers=31)
    assert "there is no 'magic'; there are tensor, " in refused(strategies=("magic",))
    assert "at least one of tensor" in refused(strategies=())
    assert "cannot be paced" in refused(load=1000.0)
    assert "even number of rows" in refused(rows=3)
    assert "2 to 2048 tokens" in refused(length=4096)
    assert "neither lora nor full" in refused(train="all")
    assert "neither fp32 nor bf16" in refused(dtype="int8")
    assert "--mbit" in refused(mbit=0.1)


def test_a_model_that_is_larger_than_the_machine_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testbed, "up", lambda *_, **__: pytest.fail("a testbed was made"))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=6 << 30))
    said = refused(shape="llama-1b", layers=16, train="full")
    assert "llama-1b with 16 blocks needs 14.7 GiB for --train full" in said
    assert "6.0 GiB are available" in said
    assert "fewer --layers" in said


def test_root_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in refused()


def test_a_testbed_that_was_left_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    left = tmp_path / "left.json"
    left.write_text("{}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("potluck.bench.pool.state_file", lambda prefix: left)
    assert f"A testbed is up already: 'potluck testbed down --prefix {PREFIX}' removes it" in refused()


@pytest.fixture
def _no_testbed() -> Any:
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        testbed.down(PREFIX)
        testbed.up([1], 10**9, prefix=PREFIX)
    except PotluckError as error:
        pytest.skip(f"this machine makes no testbed: {error}")
    testbed.down(PREFIX)
    yield
    testbed.down(PREFIX)


def started(*options: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "potluck", "bench", "pool", *SMALL, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.root
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.usefixtures("_no_testbed")
def test_every_strategy_runs_on_the_same_devices(tmp_path: Path) -> None:
    running = started("--json", "--output", str(tmp_path / "r.json"), "--picture", str(tmp_path / "r.png"))
    out, said = running.communicate(timeout=300)
    assert running.returncode == 0, said
    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((tmp_path / "r.json").read_text())
    assert (tmp_path / "r.png").stat().st_size > 10_000
    assert not state_file(PREFIX).exists()
    assert "Calibrating 3 devices" in said
    assert len(result["calibration"]["devices"]) == 3
    rows = {row["strategy"]: row for row in result["strategies"]}
    assert set(STRATEGIES[:-1]) <= rows.keys(), result["left_out"]
    for name, row in rows.items():
        assert row["step_s"] > 0
        assert row["predicted_step_s"] > 0
        assert 0 <= row["idle_ratio"] < 1
        assert row["peak_rss_mib"] > 100
        assert row["context_switches"] > 0
        for device in row["devices"]:
            # what a device was not blocked it computed; rounding and the last message are beyond
            spent = device["compute_s"] + device["wait_s"] + device["transfer_s"]
            assert 0 < spent <= row["step_s_max"] * 1.05, name
    for name in STRATEGIES[:-1]:
        assert [device["name"] for device in rows[name]["devices"]] == ["device-0", "device-1", "device-2"]
        assert rows[name]["bytes_per_device"] > 0
    assert rows["tensor-uniform-sync"]["bytes_per_device"] > 1.5 * rows["tensor-uniform"]["bytes_per_device"]
    assert rows["data"]["peak_rss_mib"] > rows["tensor-uniform"]["peak_rss_mib"], "the whole model on each device"
    losses = [row["loss"] for row in rows.values()]
    assert max(losses) - min(losses) < 0.5, "all saw the same batches"
    assert 0 < result["limit_s"] < min(row["step_s"] for row in rows.values())
    assert {(ratio["strategy"], ratio["against"]) for ratio in result["ratios"]} >= {
        ("tensor", "tensor-uniform-sync"),
        ("tensor", "pipeline"),
    }


@pytest.mark.root
@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.usefixtures("_no_testbed")
def test_ctrl_c_takes_everything_down() -> None:
    running = started("--strategies", "tensor")
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("Measuring"):
            break
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) >= 3
    time.sleep(0.5)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=60)
    assert running.returncode == 130, said
    assert "Traceback" not in said
    assert not state_file(PREFIX).exists()
    assert not any(child.is_running() for child in children)
