"""The comparison of all schemes in one go, as real processes over real sockets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_smol import save_small_smol

from potluck.bench.split import Comparison, compare
from potluck.errors import BadInput

FIELDS = {
    "scheme",
    "client",
    "targets",
    "negatives",
    "encoding",
    "eval_loss",
    "eval_accuracy",
    "bytes_up",
    "bytes_down",
    "bytes_by_kind",
    "client_active_s",
    "client_peak_rss_mib",
    "server_s",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_smol(tmp_path_factory.mktemp("small"))


def bench(model: Path, output: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "potluck", "bench", "split", "--model", str(model), "--link", "0"]
    done = subprocess.run(
        [*command, "--task", "text", "--epochs", "1", "--json", "--output", str(output), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert json.loads(output.read_text()) == result
    return result


@pytest.mark.slow
def test_every_side_of_it_has_its_row(model: Path, tmp_path: Path) -> None:
    names = ["central", "one-shot", "u-shaped"]
    drawn = ["--examples", "24", "--held-out", "12", "--partition", "topic", "--clients", "2"]
    result = bench(model, tmp_path / "result.json", *drawn, "--schemes", ",".join(names))
    assert (result["task"], result["link_mbit"], result["partition"]) == ("text", None, "topic")
    rows = dict(zip(names, result["schemes"], strict=True))
    for name, row in rows.items():
        assert row.keys() >= FIELDS, name
        assert row["scheme"] == name
        assert 0 < row["eval_loss"] < 20
        assert sum(row["bytes_by_kind"].values()) == row["bytes_up"] + row["bytes_down"]
        if name != "central":
            assert row["examples"] == 24
            assert row["client_active_s"] > 0 < row["client_peak_rss_mib"]
            assert row["server_s"] > 0 < row["server_cpu_s"]
    one_shot, u_shaped = rows["one-shot"], rows["u-shaped"]
    assert one_shot["bytes_by_kind"].keys() >= {"activations", "targets", "table", "negatives"}
    kinds = {"activations", "targets", "cut gradient", "adapter", "output", "output gradient"}
    assert u_shaped["bytes_by_kind"].keys() >= kinds
    assert u_shaped["targets"] is u_shaped["negatives"] is None
    assert one_shot["bytes_up"] + one_shot["bytes_down"] < u_shaped["bytes_up"] + u_shaped["bytes_down"]


def test_an_unknown_scheme_is_told() -> None:
    with pytest.raises(BadInput, match="There is no scheme 'z-shaped' to compare; there are central"):
        compare(Comparison(schemes=("z-shaped",)))
