"""Clients and servers that end at any time: run again they finish, nothing committed is lost, nothing is half there."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import one_shot_world
import pytest
import slow_client
from little_store import COMMANDS, little_job, written
from one_shot_world import SOON_S, Told, give, rows_file, served

from potluck.job import Job
from potluck.split.agreement import Manifest
from potluck.split.check import check_shard
from potluck.split.client import Contributed
from potluck.split.listener import SplitListener
from potluck.split.settings import settle, store_dir
from potluck.split.store import Store
from potluck.split.traffic import Traffic
from potluck.split.trainer import train_store

SLOW_MBIT = 0.1
HERE = {"PYTHONPATH": os.pathsep.join([str(Path(one_shot_world.__file__).parent), str(Path(__file__).parents[1])])}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def a_job(directory: Path) -> Job:
    return little_job(directory, {"encoding": "fp32", "negatives": 8}, epochs=1)


def manifests(job: Job) -> dict[str, Manifest]:
    return {manifest.client: manifest for manifest in Store(store_dir(job)).contributions()}


def check_store(job: Job) -> None:
    """No half file under a name, and nothing that was half received once the server has noticed."""
    directory, limits = store_dir(job), settle(job, SplitListener()).limits
    for path in (directory / "shards").iterdir():
        check_shard(path, limits)
    until = time.monotonic() + SOON_S
    while left := list((directory / "incoming").iterdir()):
        assert time.monotonic() < until, left
        time.sleep(0.05)


@pytest.mark.parametrize("at", [("Computing, tokens", 1), ("Computing, tokens", 150), ("Uploading, KiB", 1)])
def test_an_interrupted_client_goes_on_where_it_was(tmp_path: Path, at: tuple[str, int]) -> None:
    job, data = a_job(tmp_path), rows_file(tmp_path / "rows.jsonl", COMMANDS)
    with served(job, tmp_path) as server:
        interrupted = Told(lambda what, done: what == at[0] and done >= at[1])
        with pytest.raises(KeyboardInterrupt):
            give(server.invite, tmp_path, "ann", data, model=job.model, listener=interrupted)
        assert manifests(job) == {}
        again, traffic = Told(), Traffic()
        give(server.invite, tmp_path, "ann", data, model=job.model, listener=again, traffic=traffic)
        assert again.said("were computed before") == (at[0] == "Uploading, KiB")
        assert ("activations" in traffic.to_json()["sent"]) == (at[0] != "Uploading, KiB")  # the shard was sent already
        first = manifests(job)["ann"]
        give(server.invite, tmp_path, "ann", data, model=job.model)  # unbroken
        assert manifests(job) == {"ann": first}


def test_a_spool_that_was_damaged_is_computed_again(tmp_path: Path) -> None:
    job, data = a_job(tmp_path), rows_file(tmp_path / "rows.jsonl", COMMANDS)
    with served(job, tmp_path) as server:
        interrupted = Told(lambda what, done: what == "Uploading, KiB")
        with pytest.raises(KeyboardInterrupt):
            give(server.invite, tmp_path, "ann", data, model=job.model, listener=interrupted)
        for path in (tmp_path / "spool").rglob("*.safetensors"):
            path.write_bytes(path.read_bytes()[:-1] + b"\x01")
        again = Told()
        give(server.invite, tmp_path, "ann", data, model=job.model, listener=again)
        assert not again.said("were computed before")
        assert manifests(job).keys() == {"ann"}


@contextmanager
def killed_at_the_end(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | HERE) as process:
        try:
            yield process
        finally:
            process.kill()


def line_with(stream: IO[str] | None, text: str) -> str:
    assert stream is not None
    for line in stream:
        if text in line:
            return line
    raise AssertionError(f"it ended without saying {text!r}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "then_s"),
    [
        ("Computing", 0.0),
        ("Computing, tokens {total} {total}", 0.0),
        ("Computing, tokens {total} {total}", 0.8),
        ("Uploading", 0.1),
    ],
    ids=["while computing", "before the upload", "in the first shard", "between shards"],
)
def test_a_client_that_is_killed(tmp_path: Path, line: str, then_s: float) -> None:
    job, data = a_job(tmp_path), rows_file(tmp_path / "rows.jsonl", COMMANDS)
    total = sum(len(str(row["prompt"]).split()) + 3 for row in COMMANDS)
    with served(job, tmp_path) as server:
        give(server.invite, tmp_path, "bob", rows_file(tmp_path / "bob.jsonl", COMMANDS[:5]), model=job.model)
        arguments = [server.invite, str(tmp_path), "ann", str(data), job.model, str(SLOW_MBIT)]
        with killed_at_the_end([sys.executable, slow_client.__file__, *arguments]) as client:
            line_with(client.stdout, line.format(total=total))
            time.sleep(then_s)
        assert client.returncode == -signal.SIGKILL
        assert manifests(job).keys() == {"bob"}
        check_store(job)
        give(server.invite, tmp_path, "ann", data, model=job.model)
        assert manifests(job).keys() == {"ann", "bob"}
        check_store(job)
    assert [path for path in (tmp_path / "spool").rglob("*") if path.is_file()] == []
    outcome = train_store(job)
    assert outcome is not None
    assert outcome.examples == 5 + len(COMMANDS)


@pytest.mark.slow
def test_a_server_that_is_killed(tmp_path: Path) -> None:
    """Before an upload, in the middle of one, and right after a commit; its clients go on with the next one."""
    job = a_job(tmp_path)
    command = [
        sys.executable,
        "-m",
        "potluck",
        "serve",
        str(written(job, tmp_path / "job.yaml")),
        "--address",
        "127.0.0.1",
    ]

    def invited(server: subprocess.Popen[str]) -> str:
        return line_with(server.stdout, "potluck contribute").split()[2]

    done: list[Contributed] = []
    with killed_at_the_end(command) as server:
        invite = invited(server)
        data = rows_file(tmp_path / "bob.jsonl", COMMANDS[:5])
        give(invite, tmp_path, "bob", data, model=job.model)
    bobs = manifests(job)
    assert bobs.keys() == {"bob"}

    def slowly() -> None:
        traffic = Traffic(SLOW_MBIT)
        rows = rows_file(tmp_path / "rows.jsonl", COMMANDS)
        done.append(
            give(invite, tmp_path, "ann", rows, model=job.model, traffic=traffic, patience_s=SOON_S, listener=told)
        )

    told = Told()
    thread = threading.Thread(target=slowly)
    thread.start()
    for _ in range(2):
        with killed_at_the_end(command) as server:
            assert invited(server) == invite
            incoming, until = store_dir(job) / "incoming", time.monotonic() + SOON_S
            while not any(incoming.iterdir()):  # a shard is on its way
                assert time.monotonic() < until
                time.sleep(0.02)
        assert manifests(job) == bobs
    with killed_at_the_end(command) as server:
        assert invited(server) == invite
        thread.join(SOON_S)
        assert len(done) == 1
        check_store(job)
    assert manifests(job).keys() == {"ann", "bob"}
    outcome = train_store(job)
    assert outcome is not None
    assert outcome.examples == 5 + len(COMMANDS)
