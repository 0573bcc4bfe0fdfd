"""Ranks that somebody else has started: by torchrun, and by hand as a scheduler does."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from potluck.errors import BadInput
from potluck.pool.ranks import Launch, launch_of
from word_model import save_rows, save_word_model

SET = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
PATIENCE_S = 90.0
slow = pytest.mark.slow


def test_what_a_launcher_sets() -> None:
    assert launch_of({}) is None
    assert launch_of({"WORLD_SIZE": "2"}) is None
    assert launch_of({"RANK": "0", "WORLD_SIZE": "1"}) is None, "one process alone needs no group"
    assert launch_of(SET) == Launch(1, 2, 1, "10.0.0.1", 29500)
    torchrun = {"LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert launch_of(SET | torchrun) == Launch(1, 2, 2, "10.0.0.1", 29500, served=True, attempt="3")


@pytest.mark.parametrize(
    ("differs", "sentence"),
    [
        ({"MASTER_ADDR": None, "MASTER_PORT": None}, "MASTER_ADDR and MASTER_PORT not: set them too, or unset RANK"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE not: set them too"),
        ({"RANK": "one"}, "RANK=one is no whole number"),
        ({"RANK": "-1"}, "RANK=-1 is no whole number"),
        ({"RANK": "2"}, "RANK=2: with WORLD_SIZE=2, ranks go from 0 to 1"),
        ({"WORLD_SIZE": "2.0"}, "WORLD_SIZE=2.0 is no whole number"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE=x is no whole number"),
    ],
    ids=str,
)
def test_what_a_launcher_would_not_set(differs: dict[str, str | None], sentence: str) -> None:
    environment = {name: value for name, value in (SET | differs).items() if value is not None}
    with pytest.raises(BadInput, match=sentence):
        launch_of(environment)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_word_model(tmp_path_factory.mktemp("model"))


class Launcher:
    """Starts processes with a job, and ends what is left of them."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self.folder, self.model_dir = folder, model_dir
        self.processes: list[subprocess.Popen[str]] = []
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.port = server.getsockname()[1]
        self.environment = {k: v for k, v in os.environ.items() if k not in SET} | {
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(folder / "cache"),
        }

    def job(self, **differs: Any) -> Path:
        data = save_rows(self.folder / "data.jsonl")
        fields = {
            "model": str(self.model_dir),
            "data": {"train": str(data)},
            "output": str(self.folder / "out"),
            "strategy": "tensor-uniform",
            "steps": 12,
            "batch_size": 4,
            "learning_rate": 0.02,
            "dtype": "fp32",
            "threads": 1,
        }
        path = self.folder / "job.yaml"
        path.write_text(json.dumps(fields | differs))
        return path

    def torchrun(self, *options: str, job: Path) -> "subprocess.Popen[str]":
        where = ["--master-addr", "127.0.0.1", "--master-port", str(self.port)]
        argv = ["-m", "torch.distributed.run", *where, *options, "-m", "potluck", "tune", str(job)]
        return self._start(argv, {})

    def rank(self, rank: int, job: Path) -> "subprocess.Popen[str]":
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        return self._start(["-m", "potluck", "tune", str(job)], own)

    def _start(self, argv: list[str], more: dict[str, str]) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.environment | more,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def launcher(model_dir: Path, tmp_path: Path) -> Iterator[Launcher]:
    made = Launcher(model_dir, tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.terminate()  # torchrun ends its ranks
            try:
                process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def steps_of(output: Path) -> list[float]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


@slow
def test_torchrun_on_two_nodes_and_on_one_train_the_same(launcher: Launcher) -> None:
    job = launcher.job()
    nodes = [launcher.torchrun("--nnodes", "2", "--node-rank", str(rank), job=job) for rank in (0, 1)]
    said = [node.communicate(timeout=PATIENCE_S) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert "The adapter lies in" in said[0][0]
    assert "rank-1" in said[0][0]
    assert said[1][0] == "", "rank 1 says nothing where all is well"
    losses = steps_of(launcher.folder / "out")
    assert len(losses) == 12
    assert losses[-1] < 0.5 < losses[0]

    uneven = launcher.job(strategy="auto", devices="2:1", output=str(launcher.folder / "uneven"))
    one = launcher.torchrun("--nproc-per-node", "2", job=uneven)
    words = one.communicate(timeout=PATIENCE_S)
    assert one.returncode == 0, words
    assert steps_of(launcher.folder / "uneven") == pytest.approx(losses, rel=1e-3)


@slow
def test_a_plan_may_leave_a_rank_out(launcher: Launcher) -> None:
    """So small a model trains faster on one rank; the other waits, and leaves with exit code 0."""
    job = launcher.job(strategy="auto")
    ranks = [launcher.rank(rank, job) for rank in (0, 1)]
    said = [process.communicate(timeout=PATIENCE_S) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    assert "rank-0 trains alone" in said[0][0]
    assert said[1] == ("", "")


@slow
def test_what_rank_0_refuses_ends_all_with_its_sentence(launcher: Launcher) -> None:
    job = launcher.job(data={"train": "nowhere.jsonl"})
    ranks = [launcher.rank(rank, job) for rank in (0, 1)]
    said = [process.communicate(timeout=PATIENCE_S) for process in ranks]
    assert [process.returncode for process in ranks] == [2, 2]
    assert said == [("", "potluck: There is no data file or directory at nowhere.jsonl.\n")] * 2


@pytest.mark.timing
@slow
@pytest.mark.parametrize("who", [0, 1])
def test_an_interrupt_of_one_rank_ends_both(launcher: Launcher, who: int) -> None:
    job = launcher.job(steps=1_000_000)
    ranks = [launcher.rank(rank, job) for rank in (0, 1)]
    assert ranks[0].stdout is not None
    assert any(line.startswith("step ") for line in ranks[0].stdout)
    began = time.monotonic()
    ranks[who].send_signal(signal.SIGINT)
    said = [process.communicate(timeout=20)[1] for process in ranks]
    assert time.monotonic() - began < 10
    assert [process.returncode for process in ranks] == [130 if rank == who else 1 for rank in (0, 1)], said
    assert said[1 - who] == f"potluck: rank-{who} was interrupted.\n"
    assert not (launcher.folder / "out").exists()


@slow
def test_a_rank_that_waits_for_others_can_be_interrupted(launcher: Launcher) -> None:
    waiting = launcher.rank(1, launcher.job())
    time.sleep(12.0)  # by then it has imported what it needs
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(timeout=20) == 143
