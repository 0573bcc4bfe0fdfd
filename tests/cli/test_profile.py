"""``potluck profile`` as a person types it."""

import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import potluck.cli
import potluck.pool.profiling as profiling
from potluck.pool.profile import Profile, read_profile
from word_model import save_rows, save_word_model


@pytest.fixture(autouse=True)
def _sigterm_as_it_was() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["potluck", "profile", *arguments])
    with pytest.raises(SystemExit) as left:
        potluck.cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def test_a_profile_and_one_like_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_word_model(tmp_path / "model")
    save_rows(tmp_path / "data.jsonl")
    (tmp_path / "job.yaml").write_text(
        "model: model\ndata: {train: data.jsonl}\noutput: out\nbatch_size: 4\ndtype: fp32\nthreads: 1\n"
    )
    assert run(monkeypatch, "job.yaml", "--name", "pi", "--json") == 0
    shown = capsys.readouterr()
    said: dict[str, Any] = json.loads(shown.out)
    assert said.pop("file") == "pi.profile.json"
    profile = read_profile(tmp_path / "pi.profile.json")
    assert Profile.model_validate(said) == profile
    assert (profile.device, profile.machine.threads, profile.work.rows) == ("pi", 1, 2)
    assert "vocabulary rows" in shown.err
    assert "pi.profile.json" in shown.err

    def measured(work: object, **options: object) -> Profile:
        assert work == profile.work
        assert (options["name"], options["threads"], options["pace"]) == ("tau", 1, 0.5)
        return profile.model_copy(update={"device": "tau"})

    monkeypatch.setattr(profiling, "profile_work", measured)
    options = ("--name", "tau", "--threads", "1", "--pace", "0.5", "--output", "other.json")
    assert run(monkeypatch, "--like", "pi.profile.json", *options) == 0
    assert read_profile(tmp_path / "other.json") == profile.model_copy(update={"device": "tau"})
    assert "other.json" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["other.json", "pi.profile.json"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Give a job file, or --like"),
        (["job.yaml", "--like", "a.json"], "not both"),
        (["--like", "a.json"], "There is no profile at a.json."),
        (["missing.yaml"], "There is no job file at missing.yaml."),
        (["job.yaml", "--name", "a/b"], "'a/b' cannot begin the name of a file"),
        (["job.yaml", "--output", "."], "is a directory"),
        (["job.yaml", "--output", "nowhere/a.json"], "there is no directory nowhere"),
    ],
)
def test_refused_with_a_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments) == 2
    shown = capsys.readouterr().err
    assert sentence in shown
    assert "Traceback" not in shown
    assert not list(tmp_path.iterdir())
