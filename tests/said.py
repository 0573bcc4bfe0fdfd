"""What a command says with --json."""

import json
import sys
from typing import Any

import pytest

import potluck.cli


def potluck_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, Any]:
    """Run a command in this process; its last line of output."""
    monkeypatch.setattr(sys, "argv", ["potluck", *arguments, "--json"])
    with pytest.raises(SystemExit) as left:
        potluck.cli.main()
    shown = capsys.readouterr()
    assert left.value.code == 0, shown.err
    said: dict[str, Any] = json.loads(shown.out.splitlines()[-1])
    return said
