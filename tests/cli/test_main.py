"""Exit codes and sentences of the command line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import potluck.cli
import potluck.job
from potluck.errors import BadInput, DeviceLost


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["potluck", *arguments])
    with pytest.raises(SystemExit) as left:
        potluck.cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


@pytest.fixture(autouse=True)
def _sigterm_as_it_was() -> object:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (BadInput("data.jsonl:3 holds no answer."), 2, "potluck: data.jsonl:3 holds no answer.\n"),
        (DeviceLost("device-1 was killed."), 1, "potluck: device-1 was killed.\n"),
        (KeyboardInterrupt(), 130, "potluck: Interrupted; every device was ended and nothing was saved.\n"),
        (ZeroDivisionError("by zero"), 1, "potluck: Unexpected ZeroDivisionError: by zero\n"),
    ],
)
def test_an_error_is_a_sentence_and_an_exit_code(
    error: BaseException,
    status: int,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr(potluck.job, "load_job", fail)
    assert run(monkeypatch, "tune", "job.yaml") == status
    shown = capsys.readouterr()
    assert shown.err.startswith(sentence)
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_debug_shows_the_traceback_and_its_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(path: Path) -> None:
        error = DeviceLost("device-1 was killed.")
        error.add_note("Standard error of device-1: ouch")
        raise error

    monkeypatch.setattr(potluck.job, "load_job", fail)
    assert run(monkeypatch, "tune", "job.yaml", "--debug") == 1
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert "ouch" in shown


@pytest.mark.parametrize("arguments", [["tune"], ["tuen", "job.yaml"], ["tune", "a.yaml", "--no-such-option"]])
def test_wrong_usage_is_exit_code_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *arguments) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_missing_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "tune", str(tmp_path / "job.yaml")) == 2
    assert capsys.readouterr().err == f"potluck: There is no job file at {tmp_path / 'job.yaml'}.\n"


def test_options_are_checked_as_the_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model: none\noutput: {tmp_path / 'out'}\ndata:\n  train: {tmp_path / 'none.jsonl'}\n")
    assert run(monkeypatch, "tune", str(job), "--devices", "three") == 2
    assert not (tmp_path / "out").exists()
    assert capsys.readouterr().err.count("\n") == 1


def test_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(monkeypatch, "--version") == 0
    assert capsys.readouterr().out == f"potluck {potluck.__version__}\n"


def test_help_does_not_wait_for_torch() -> None:
    code = "import sys, potluck.cli as c; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    helped = subprocess.run([sys.executable, "-m", "potluck", "--help"], check=True, capture_output=True, text=True)
    for command in ("tune", "join", "profile", "plan", "testbed", "generate", "eval", "merge", "demo"):
        assert f" {command} " in helped.stdout


def test_every_public_name_is_there() -> None:
    for name in potluck.__all__:
        assert getattr(potluck, name) is not None
    assert set(potluck._HOMES) < set(potluck.__all__)
    with pytest.raises(AttributeError, match="no attribute 'tunes'"):
        potluck.tunes  # noqa: B018


def test_names_of_pools_of_several_machines_are_those_of_their_homes() -> None:
    from potluck.pool import crew, join, profile, profiling, what_if

    assert (potluck.Gathering, potluck.Manners) == (crew.Gathering, crew.Manners)
    assert (potluck.Guest, potluck.join, potluck.what_if) == (join.Guest, join.join, what_if.what_if)
    assert (potluck.profile_job, potluck.profile_work) == (profiling.profile_job, profiling.profile_work)
    assert (potluck.read_profile, potluck.write_profile) == (profile.read_profile, profile.write_profile)
    code = "import sys, potluck; assert 'what_if' in dir(potluck) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.timing
def test_sigterm_unwinds() -> None:
    """A terminated command runs its clean-up: devices and temporary directories depend on it."""
    code = (
        "import sys, time, potluck.cli, potluck.job\n"
        "def wait(path):\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    finally:\n"
        "        print('cleaned up', flush=True)\n"
        "potluck.job.load_job = wait\n"
        "sys.argv = ['potluck', 'tune', 'job.yaml']\n"
        "potluck.cli.main()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        os.kill(process.pid, signal.SIGTERM)
        assert process.stdout.read() == "cleaned up\n"
        assert process.wait() == 143
    assert time.monotonic() - began < 5


def test_json_is_the_last_line_of_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use = pytest.importorskip("potluck.use")
    monkeypatch.setattr(use, "generate", lambda directory, prompts, **options: [f"{prompts[0]} é {options}"])
    assert run(monkeypatch, "generate", str(tmp_path), "hello", "--max-new-tokens", "3", "--json") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    expected = "hello é {'pairs': None, 'max_new_tokens': 3, 'format': 'auto'}"
    assert json.loads(last) == {"prompt": "hello", "answer": expected}
