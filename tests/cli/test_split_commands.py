"""``serve``, ``contribute``, ``train`` and ``fetch`` as people type them, on a tiny model and over real sockets."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest
import torch

import potluck.cli
from potluck.control.invite import Invite
from potluck.split.trainer import CHECKPOINT_FILE
from word_model import save_rows, save_word_model

LOCAL = "127.0.0.1"
JOB = (
    "model: model\noutput: out\nepochs: 30\nbatch_size: 4\nlearning_rate: 0.02\ndtype: fp32\nthreads: 1\n"
    "split: {cut: 1, encoding: bf16, negatives: 24, clients: 2}\n"
)
CHECKPOINTS_OFTEN = (
    "import potluck.cli, potluck.split.trainer as t\n"
    "t.train_store.__kwdefaults__['checkpoint_every_s'] = 0\n"
    "potluck.cli.main()\n"
)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield
    signal.signal(signal.SIGTERM, before)
    torch.set_num_threads(threads)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with a model, a job and data; nothing is written into the person's own directories."""
    for variable, directory in (("XDG_CACHE_HOME", "cache"), ("XDG_DATA_HOME", "data-home")):
        monkeypatch.setenv(variable, str(tmp_path / directory))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    save_word_model(tmp_path / "model", num_hidden_layers=3)
    save_rows(tmp_path / "data.jsonl")
    (tmp_path / "twice.jsonl").write_text((tmp_path / "data.jsonl").read_text() * 2)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.status == 0, self.err
        answer: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return answer


def command(*arguments: str, code: str | None = None) -> list[str]:
    return [sys.executable, *(["-m", "potluck"] if code is None else ["-c", code]), *arguments]


def run(*arguments: str, stdin: str = "") -> Ran:
    done = subprocess.run(command(*arguments), input=stdin, capture_output=True, text=True, timeout=120)
    return Ran(done.returncode, done.stdout, done.stderr)


@contextmanager
def started(arguments: Sequence[str], code: str | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process that Ctrl-C reaches as at a terminal; ended at the end."""
    process = subprocess.Popen(
        command(*arguments, code=code),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_with(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    seen = []
    for line in stream:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"it ended without saying {text!r}: {seen}")


def wait_for_file(under: Path, name: Path, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not any(under.rglob(str(name))):
        assert time.monotonic() < deadline, f"no {name} within {timeout_s:.0f} s"
        time.sleep(0.01)


def interrupted(process: subprocess.Popen[str]) -> Ran:
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    return Ran(process.returncode, out, err)


QUALITY = {"loss", "accuracy", "examples", "target_tokens", "perplexity"}
OUTCOME = {
    *("adapter", "scheme", "clients", "contributions", "examples", "target_tokens", "steps", "loss_first", "loss_last"),
    *("before", "after", "distinct_targets", "negatives", "train_s"),
}
CONTRIBUTED = {
    *("name", "contribution", "examples", "held_out", "dropped", "target_tokens", "bytes", "active_s", "peak_rss_mib"),
    "adapter",
}


@pytest.mark.slow
def test_the_four_commands_one_after_the_other(place: Path) -> None:
    with started(["serve", "job.yaml", "--address", LOCAL, "--train-when", "2"]) as server:
        invite = line_with(server.stdout, "potluck contribute ").split()[2]
        assert Invite.decode(invite).host == LOCAL

        ann = run("contribute", "-", "twice.jsonl", "--name", "ann", "--holdout", "25%", "--json", stdin=invite + "\n")
        assert ann.json.keys() == CONTRIBUTED
        assert (ann.json["name"], ann.json["examples"], ann.json["held_out"]) == ("ann", 6, 2)
        assert ann.json["bytes"]["sent"]["activations"] > 0
        assert invite not in ann.err + ann.out

        early = run("fetch", invite, "--name", "ann", "--output", "early")
        assert (early.status, early.err.count("\n")) == (2, 1)
        assert "has not trained yet" in early.err

        bob = run("contribute", invite, "data.jsonl", "--name", "bob", "--model", "model", "--wait", "--output", "bobs")
        assert bob.status == 0, bob.err
        assert re.search(r"Contributed 4 examples as bob: \d+\.\d MiB in \d+ s\.", bob.out)
        assert (place / "bobs" / "adapter_model.safetensors").exists()
        line_with(server.stdout, "clients get it with 'potluck fetch'")

        # which model it is used with is known, and the format of the examples too
        assert run("generate", "bobs", "light on ->", "--json").json["answer"] == "A"
        assert run("eval", "bobs", "data.jsonl", "--json").json["after"]["accuracy"] == 1.0

        fetched = run("fetch", "-", "--name", "ann", "--output", "anns", "--model", "model", "--json", stdin=invite)
        assert fetched.json == {"adapter": "anns"}
        assert "The adapter lies in anns." in fetched.err
        again = run("fetch", invite, "--name", "ann", "--output", "anns")
        assert (again.status, "--overwrite" in again.err) == (2, True)

        gone = run("contribute", invite, "--name", "bob", "--withdraw")
        assert (gone.status, gone.out) == (0, "The server has deleted all that bob contributed.\n")
        left = interrupted(server)
    assert left.status == 130
    assert left.err == (
        f"potluck: Stopped. What was contributed is kept in {place / 'out-store'}; started again, the server has the"
        " same invite.\n"
    )

    further = run("train", "job.yaml", "--continue", "--json").json
    assert further.keys() == OUTCOME
    assert further["clients"] == ["ann"]
    assert further["before"].keys() == further["after"].keys() == {"ann", "overall"}
    assert further["after"]["overall"].keys() == QUALITY
    assert further["adapter"] == str(place / "out")

    refused = run("train", "job.yaml")
    assert refused.status == 2
    assert refused.err == ("potluck: out is not empty: name another directory, or replace it with --overwrite.\n")
    served = run(
        *("serve", "job.yaml", "--address", LOCAL, "--train-when", "1", "--exit-when-trained", "--overwrite", "--json")
    )
    assert served.json.keys() == OUTCOME
    assert len(served.out.splitlines()) == 1
    assert invite in served.err


@pytest.mark.slow
def test_ctrl_c_is_a_sentence_and_the_same_command_goes_on(place: Path) -> None:
    with started(["serve", "job.yaml", "--address", LOCAL]) as server:
        invite = line_with(server.stdout, "potluck contribute ").split()[2]
        arguments = ["contribute", invite, "twice.jsonl", "--name", "ann", "--model", "model", "--holdout", "2"]
        with started([*arguments, "--wait"]) as client:
            line_with(client.stdout, "Waiting until the server has trained")
            left = interrupted(client)
        assert (left.status, left.err) == (
            130,
            "potluck: Interrupted. Run the same command again, and it goes on where it was.\n",
        )
        assert not (place / "adapter").exists()

        (place / "job.yaml").write_text(JOB.replace("epochs: 30", "epochs: 400"))
        with started(["train", "job.yaml"], code=CHECKPOINTS_OFTEN) as training:
            line_with(training.stdout, "before training")
            wait_for_file(place, CHECKPOINT_FILE)
            left = interrupted(training)
        assert (left.status, left.err) == (
            130,
            "potluck: Interrupted. Run the same command again: it goes on from the last checkpoint.\n",
        )
        assert not (place / "out").exists()
        trained = run("train", "job.yaml", "--json")
        assert trained.json["steps"] == 800
        resumed = re.search(r"Going on after step (\d+),", trained.err)
        assert resumed is not None, trained.err
        assert int(resumed[1]) > 0

        again = run(*arguments, "--wait", "--json").json
        assert again["adapter"] == "adapter"
        assert "activations" not in again["bytes"]["sent"]
        assert interrupted(server).status == 130


def test_what_is_wrong_is_one_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["potluck", *arguments])
        with pytest.raises(SystemExit) as left:
            potluck.cli.main()
        assert left.value.code == 2
        shown = capsys.readouterr()
        assert shown.err.count("\n") == 1, shown.err
        return shown.err.removeprefix("potluck: ")

    assert refused("tune", "job.yaml").startswith("This job has a 'split' section, for clients and a server: run")
    assert refused("train", "job.yaml").startswith("Nothing has been contributed to")
    assert refused("serve", "none.yaml") == "There is no job file at none.yaml.\n"
    assert "invite" in refused("contribute", "nonsense", "data.jsonl")
    assert "invite" in refused("fetch", "nonsense")
    assert refused("contribute", "nonsense").startswith("Name the examples to contribute")
    assert "--holdout 'half'" in refused("contribute", "nonsense", "data.jsonl", "--holdout", "half")
    steps = JOB.replace("{cut: 1,", "{cut: 1, scheme: l-shaped,").replace(", clients: 2", "")
    (place / "job.yaml").write_text(steps)
    assert "--train-when" in refused("serve", "job.yaml", "--address", LOCAL)
    (place / "job.yaml").write_text(JOB.replace("{cut: 1,", "{cut: 1, client: trainable,"))
    assert "leaves after its upload" in refused("serve", "job.yaml")
    (place / "out").write_text("")
    (place / "job.yaml").write_text(JOB)
    assert "is a file" in refused("serve", "job.yaml", "--train-when", "2", "--address", LOCAL)
