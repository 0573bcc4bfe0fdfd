"""The commands, as a person gives them."""

import json
import os

import pytest
from typer.testing import CliRunner

from potluck.cli.testbed import app
from potluck.errors import BadInput, PotluckError
from potluck.testbed import lifecycle, network

_runner = CliRunner()


def refused(*arguments: str) -> str:
    result = _runner.invoke(app, list(arguments))
    assert isinstance(result.exception, BadInput)
    return str(result.exception)


def test_bad_input_is_told_before_anything_is_made() -> None:
    assert "--speeds" in refused("up", "--speeds", "1:x", "--link", "1gbit")
    assert "--link" in refused("up", "--speeds", "1:1", "--link", "fast")
    assert "--names" in refused("up", "--speeds", "1:1", "--link", "1gbit", "--names", "a:a")
    assert "--memory" in refused("up", "--speeds", "1:1", "--link", "1gbit", "--memory", "lots")
    assert "No testbed is up" in refused("run", "--prefix", "ptestnone", "--", "true")


def test_root_and_tools_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in refused("up", "--speeds", "1:1", "--link", "1gbit", "--prefix", "ptest")
    assert "needs root" in refused("down", "--prefix", "ptest")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    with pytest.raises(BadInput, match="needs tc, missing here: install iproute2"):
        lifecycle.down("ptest")


@pytest.mark.root
@pytest.mark.alone
def test_missing_kernel_part_is_named(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "_BRIDGE", "a name far too long for an interface")
    with pytest.raises(PotluckError, match=r"'ip -n ptest\.switch link add a name far too long"):
        lifecycle.up([1], 10**9, prefix=prefix)
    assert network.found(prefix) == []


@pytest.mark.root
@pytest.mark.alone
def test_up_status_run_down(prefix: str) -> None:
    common = ("--prefix", prefix)
    made = _runner.invoke(app, ["up", "--speeds", "2:1", "--link", "1gbit", "--names", "hub:cam", "--json", *common])
    assert made.exit_code == 0, made.output
    shown = json.loads(_runner.invoke(app, ["status", "--json", *common]).stdout.splitlines()[-1])
    assert shown == json.loads(made.stdout.splitlines()[-1])
    assert [device["name"] for device in shown["devices"]] == ["hub", "cam"]
    ran = _runner.invoke(
        app, ["run", "--device", "cam", *common, "--", "sh", "-c", "echo {name}; echo [b]x >&2; exit 4"]
    )
    assert ran.exit_code == 4
    assert ran.stdout == "cam | cam\n"
    assert ran.stderr == "cam | [b]x\ncam | cam ended with status 4.\n"
    assert _runner.invoke(app, ["down", *common]).stdout == "The testbed is down.\n"
    assert _runner.invoke(app, ["down", *common]).stdout == "No testbed was up.\n"
