"""The schemes that are compared, and one run of one of them with real processes over real sockets."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from potluck.errors import PotluckError
from potluck.job import Job, dump_job
from potluck.job_sections import Data, Split

_LOOK_EVERY_S = 0.2
_SAID_BYTES = 2000


@dataclass(frozen=True)
class Scheme:
    """One row of the comparison."""

    scheme: Literal["one-shot", "l-shaped", "u-shaped"]
    client: Literal["frozen", "trainable"] = "frozen"
    targets: Literal["embeddings", "ids"] = "embeddings"
    negatives: int | Literal["table"] = 4096
    encoding: Literal["fp32", "bf16", "int8", "int4"] = "int8"
    lose_half: bool = False
    """Half of the clients leave: after their upload in one-shot, in the middle of training else."""

    def split(self, cut: int, clients: int) -> Split:
        """As a job says it."""
        return Split(
            scheme=self.scheme,
            cut=cut,
            client=self.client,
            targets=self.targets,
            negatives=self.negatives,
            encoding=self.encoding,
            clients=clients,
        )


SCHEMES: dict[str, Scheme] = {
    "one-shot": Scheme("one-shot"),
    "one-shot-int4": Scheme("one-shot", encoding="int4"),
    "one-shot-table": Scheme("one-shot", negatives="table"),
    "one-shot-512": Scheme("one-shot", negatives=512),
    "one-shot-0": Scheme("one-shot", negatives=0),
    "one-shot-ids": Scheme("one-shot", targets="ids"),
    "l-shaped": Scheme("l-shaped", encoding="bf16"),
    "l-shaped-trainable": Scheme("l-shaped", "trainable", encoding="bf16"),
    "u-shaped": Scheme("u-shaped", "trainable", encoding="bf16"),
    "u-shaped-frozen": Scheme("u-shaped", encoding="bf16"),
    "one-shot-half": Scheme("one-shot", lose_half=True),
    "u-shaped-half": Scheme("u-shaped", "trainable", encoding="bf16", lose_half=True),
}
"""By the names that ``bench split --schemes`` takes."""
DEFAULT = [name for name in SCHEMES if not name.endswith("-half")]


@dataclass(frozen=True)
class Common:
    """What all rows of a comparison have in common."""

    model_dir: Path
    client_files: tuple[Path, ...]
    max_length: int
    cut: int
    steps: int
    batch_size: int
    learning_rate: float
    seed: int
    link_mbit: float | None
    threads: int
    format: Literal["prompt", "text"]

    def job(self, output: Path, split: Split | None) -> Job:
        """The job of one row."""
        return Job(
            model=str(self.model_dir),
            data=Data(train=[str(file) for file in self.client_files], format=self.format, max_length=self.max_length),
            output=output,
            split=split,
            threads=self.threads,
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            seed=self.seed,
        )


def run_scheme(scheme: Scheme, common: Common, scratch: Path, on_step: Callable[[int, int], None]) -> dict[str, Any]:
    """Serve, contribute, train; what it took. The adapter lies in ``scratch / "out"``.

    One-shot clients come one after the other, each on an otherwise idle machine, as they would on machines of their
    own; clients of step schemes have to be there at the same time.

    Raises:
        PotluckError: a process ended; the message ends with what it said last.
    """
    clients = len(common.client_files)
    job = common.job(scratch / "out", scheme.split(common.cut, clients))
    job_file, invite = scratch / "job.yaml", scratch / "invite"
    job_file.write_text(dump_job(job), encoding="utf-8")
    began = time.monotonic()
    with ExitStack() as stack:
        server = stack.enter_context(
            _Process("server", "potluck.bench.server", [job_file, scratch / "server", clients, invite], scratch)
        )
        server.wait_for(invite.exists)
        specs = [_client_spec(i, file, common, invite, scratch, scheme) for i, file in enumerate(common.client_files)]
        leaving = (
            range(clients - clients // 2, clients) if scheme.lose_half and scheme.scheme != "one-shot" else range(0)
        )
        if scheme.scheme == "one-shot":
            done = [stack.enter_context(_client(i, spec, scratch)).result(server) for i, spec in enumerate(specs)]
        else:
            running = [stack.enter_context(_client(i, spec, scratch)) for i, spec in enumerate(specs)]
            if leaving:
                server.wait_for(lambda: server.steps()[0] >= common.steps // 2)
                for i in leaving:
                    running[i].kill()
            staying = [client for i, client in enumerate(running) if i not in leaving]

            def look() -> None:
                on_step(*server.steps())
                for client in staying:  # the server would wait for one that failed to begin
                    client.check()

            server.wait_for(server.ended, look)
            done = [client.result(None) for client in staying]
        server.wait_for(server.ended, lambda: on_step(*server.steps()))
        outcome = server.result(None)
    return _row(scheme, done, outcome, time.monotonic() - began)


def _row(scheme: Scheme, done: Sequence[dict[str, Any]], outcome: dict[str, Any], wall_s: float) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for client in done:
        for way in ("sent", "received"):
            for kind, size in client["bytes"][way].items():
                kinds[kind] = kinds.get(kind, 0) + size
    ids = scheme.targets == "ids"
    labels_stay = scheme.scheme == "u-shaped"
    return {
        "scheme": scheme.scheme,
        "client": scheme.client,
        "targets": None if labels_stay else scheme.targets,
        "negatives": None if labels_stay or ids else scheme.negatives,
        "encoding": scheme.encoding,
        "half_left": scheme.lose_half,
        "bytes_up": sum(sum(client["bytes"]["sent"].values()) for client in done),
        "bytes_down": sum(sum(client["bytes"]["received"].values()) for client in done),
        "bytes_by_kind": kinds,
        "client_active_s": sum(client["active_s"] for client in done) / len(done),
        "client_peak_rss_mib": max(client["peak_rss_mib"] for client in done),
        "server_s": outcome["train_s"],
        "server_cpu_s": outcome["cpu_s"],
        "total_s": wall_s,
        "steps": outcome["steps"],
        "distinct_targets": outcome["distinct_targets"],
        "negatives_used": outcome["negatives"],
        "examples": outcome["examples"],
        "target_tokens": outcome["target_tokens"],
    }


def _client_spec(i: int, file: Path, common: Common, invite: Path, scratch: Path, scheme: Scheme) -> dict[str, Any]:
    return {
        "invite": str(invite),
        "data": str(file),
        "name": f"client-{i + 1}",
        "model": str(common.model_dir),
        "home": str(scratch / f"client-{i + 1}"),
        "link_mbit": common.link_mbit,
        "send_ids": scheme.targets == "ids",
    }


def _client(i: int, spec: dict[str, Any], scratch: Path) -> "_Process":
    return _Process(f"client-{i + 1}", "potluck.bench.client", [json.dumps(spec)], scratch)


class _Process:
    """A process whose last line of output is its result; ended with the block."""

    def __init__(self, name: str, module: str, arguments: Sequence[object], scratch: Path) -> None:
        self._name = name
        self._out, self._err = scratch / f"{name}.out", scratch / f"{name}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *map(str, arguments)],
                stdout=out,
                stderr=err,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def check(self) -> None:
        """See that it has not failed so far.

        Raises:
            PotluckError: it has ended with an error.
        """
        if self._process.poll() not in (None, 0):
            raise PotluckError(f"The {self._name} of the comparison ended: {self._said()}")

    def wait_for(self, true: Callable[[], bool], meanwhile: Callable[[], None] = lambda: None) -> None:
        """Until something is so, as long as this process lives.

        Raises:
            PotluckError: it has ended with an error.
        """
        while not true():
            self.check()
            meanwhile()
            time.sleep(_LOOK_EVERY_S)

    def result(self, other: "_Process | None") -> dict[str, Any]:
        """Its result, when it has ended.

        Raises:
            PotluckError: it, or ``other`` meanwhile, failed.
        """
        while self._process.poll() is None:
            if other is not None:
                other.check()
            time.sleep(_LOOK_EVERY_S)
        self.check()
        return dict(json.loads(self._out.read_text(encoding="utf-8").splitlines()[-1]))

    def steps(self) -> tuple[int, int]:
        """Step and steps, as the server last said."""
        with self._err.open("rb") as file:
            file.seek(max(0, self._err.stat().st_size - _SAID_BYTES))
            for line in reversed(file.read().decode(errors="replace").splitlines()):
                if line.startswith('{"step"'):
                    try:
                        told = json.loads(line)
                        return int(told["step"]), int(told["steps"])
                    except ValueError:
                        continue
        return 0, 0

    def _said(self) -> str:
        lines = self._err.read_text(encoding="utf-8", errors="replace").splitlines()
        return " ".join(line for line in lines[-8:] if not line.startswith('{"step"')) or "without a word"
