"""The comparison of all schemes in one go, as real processes over real sockets."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_smol import save_small_smol

from potluck.bench.schemes import SCHEMES

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
ONE_SHOT, STEPS = {"activations", "targets", "table"}, {"activations", "targets", "cut gradient", "adapter"}


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
def test_every_kind_of_scheme_has_its_row(model: Path, tmp_path: Path) -> None:
    names = ["central", "one-shot", "one-shot-half", "one-shot-ids", "one-shot-int4", "l-shaped-trainable", "u-shaped"]
    result = bench(model, tmp_path / "result.json", "--examples", "24", "--schemes", ",".join(names))
    assert (result["task"], result["link_mbit"]) == ("text", None)
    rows = dict(zip(names, result["schemes"], strict=True))
    for name, row in rows.items():
        assert row.keys() >= FIELDS, name
        assert row["scheme"] == ("central" if name == "central" else SCHEMES[name].scheme)
        assert 0 < row["eval_loss"] < 20
        assert sum(row["bytes_by_kind"].values()) == row["bytes_up"] + row["bytes_down"]
        kinds = row["bytes_by_kind"].keys()
        match row["scheme"], row["client"]:
            case "one-shot", _:
                assert kinds >= (ONE_SHOT if row["targets"] == "embeddings" else ONE_SHOT - {"table"})
                assert ("negatives" in kinds) == bool(row["negatives"])
            case "l-shaped", "trainable":
                assert kinds >= STEPS
            case "u-shaped", _:
                assert kinds >= STEPS | {"output", "output gradient"}
                assert row["targets"] is row["negatives"] is None
        if name != "central":
            assert row["client_active_s"] > 0 < row["client_peak_rss_mib"]
            assert row["server_s"] > 0 < row["server_cpu_s"]
    assert rows["one-shot-half"]["eval_loss"] == pytest.approx(rows["one-shot"]["eval_loss"], abs=1e-4)
    assert rows["one-shot-int4"]["bytes_up"] < rows["one-shot"]["bytes_up"]
    up_and_down = {name: row["bytes_up"] + row["bytes_down"] for name, row in rows.items()}
    assert up_and_down["one-shot"] < up_and_down["l-shaped-trainable"] < up_and_down["u-shaped"]


@pytest.mark.slow
def test_clients_may_have_different_topics(model: Path, tmp_path: Path) -> None:
    arguments = ["--examples", "24", "--schemes", "one-shot", "--partition", "topic", "--clients", "2"]
    result = bench(model, tmp_path / "result.json", *arguments)
    assert result["partition"] == "topic"
    assert [row["examples"] for row in result["schemes"]] == [24]


def test_an_unknown_scheme_is_told(model: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="There is no scheme 'z-shaped' to compare; there are central"):
        bench(model, tmp_path / "result.json", "--schemes", "z-shaped")
