"""The processes of ``bench pool`` with real forks and Gloo, on this machine's own network and not paced."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
from transformers import LlamaConfig

from potluck.bench.pool_hosts import Hosts, hosts_of
from potluck.bench.pool_plans import job_of, work_of_rows
from potluck.bench.pool_rank import examples_of
from potluck.bench.pool_spec import RankSpec
from potluck.errors import DeviceLost
from potluck.job import Job
from potluck.pool.plan import make_plan
from potluck.pool.profile import Work
from potluck.testbed.state import Testbed

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
JOB: Job = job_of(train="lora", dtype="fp32", rows=4)
WORK: Work = work_of_rows(JOB, CONFIG, 8)


@dataclass(frozen=True)
class Here:
    """A device that is this machine itself."""

    name: str
    rank: int
    speed: float = 1.0
    address: str = "127.0.0.1"

    def command(self, argv: list[str]) -> list[str]:
        return argv


@dataclass(frozen=True)
class Bed:
    devices: tuple[Here, ...]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    bed = Bed((Here("one", 0), Here("two", 1)))
    with hosts_of(cast(Testbed, bed), tmp_path_factory.mktemp("hosts")) as started:
        yield started


def specs(strategy: str, **job: Any) -> list[RankSpec]:
    asked = JOB.model_copy(update={"strategy": strategy, "devices": "2", "micro_batch_size": 1, **job})
    plan = make_plan(asked, CONFIG, ["one", "two"])
    return [
        RankSpec(
            task="train",
            device=name,
            rank=rank,
            world_size=2,
            address="127.0.0.1",
            store="",
            pace=None,
            job=JOB.model_dump(mode="json"),
            work=WORK.model_dump(mode="json"),
            plan=plan.to_json(),
        )
        for rank, name in enumerate(("one", "two"))
    ]


def ranks_of(hosts: Hosts) -> list[psutil.Process]:
    """The forked processes."""
    return [child for host in hosts._hosts.values() for child in psutil.Process(host._process.pid).children()]


BOTH = ("one", "two")


@pytest.mark.slow
def test_strategies_step_in_turn_and_see_the_same_batches(hosts: Hosts) -> None:
    assert hosts.imported_bytes > 100 << 20
    for strategy in ("tensor", "pipeline", "data"):
        hosts.begin(strategy, specs(strategy), "ready")
    losses = []
    for strategy in ("tensor", "pipeline", "data"):
        first, second = hosts.tell(strategy, BOTH, {"step": 0}, "stepped")
        assert len(first["devices"]) == 2
        assert first["loss"] == second["loss"]
        for said in (first, second):
            assert said["step_s"] > 0
            assert said["bytes_sent"] > 0
            assert said["cpu_s"] > 0
            assert said["peak_rss_mib"] > 100
        losses.append(first["loss"])
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-2), "the wires of some are bfloat16"
    for strategy in ("tensor", "pipeline", "data"):
        hosts.end(strategy, BOTH)
    assert not ranks_of(hosts), "memory is free again"


@pytest.mark.timing
@pytest.mark.slow
def test_who_does_not_step_takes_no_processor_time(hosts: Hosts) -> None:
    hosts.begin("tensor", specs("tensor"), "ready")
    hosts.tell("tensor", BOTH, {"step": 0}, "stepped")
    deadline = time.monotonic() + 10
    while any(rank.status() != psutil.STATUS_STOPPED for rank in ranks_of(hosts)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = [rank.cpu_times() for rank in ranks_of(hosts)]
    time.sleep(0.3)
    assert [rank.cpu_times() for rank in ranks_of(hosts)] == before
    hosts.tell("tensor", BOTH, {"step": 1}, "stepped")  # and goes on
    hosts.end("tensor", BOTH)


@pytest.mark.slow
def test_a_process_that_is_killed_is_named_and_all_end(tmp_path: Path) -> None:
    bed = Bed((Here("one", 0), Here("two", 1)))
    with hosts_of(cast(Testbed, bed), tmp_path) as hosts:
        hosts.begin("tensor", specs("tensor"), "ready")
        ranks = ranks_of(hosts)
        assert len(ranks) == 2
        os.kill(ranks[1].pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=r"two \('tensor'\) was killed by SIGKILL"):
            hosts.tell("tensor", BOTH, {"step": 0}, "stepped")
        pids = [host._process.pid for host in hosts._hosts.values()]
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_examples_are_the_same_everywhere_and_all_of_one_length() -> None:
    examples = examples_of(3, 4, 8, 64)
    assert examples == examples_of(3, 4, 8, 64)
    assert examples != examples_of(4, 4, 8, 64)
    assert {len(example.ids) for example in examples} == {8}
    assert all(0 <= token < 64 for example in examples for token in example.ids)
    assert all(example.supervised == (False, *[True] * 7) for example in examples)
