"""FedAvg of LoRA adapters over Flower: an outside reference on the same job.

Real Flower processes talk over HTTP on this machine: one SuperLink (the server) and one SuperNode a client, each of
which starts its app (:mod:`potluck.bench.flower_app`) in a process of its own.
"""

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.bench.measured import ADAPTER, SUMMARY_FILE
from potluck.errors import BadInput, PotluckError
from potluck.job_sections import Data
from potluck.models.memory import memory_mib
from potluck.models.save import replace_directory
from potluck.texts.rows import Row
from potluck.use import encode_for, inference_dtype, score

_APP = "from potluck.bench.flower_app import client_app, server_app\n\n__all__ = ['client_app', 'server_app']\n"
_CONNECTION = "bench"
_STOP_S = 5.0
_SAID_BYTES = 4_000


def missing_flower() -> str | None:
    """Why FedAvg cannot run here, as a sentence; None if it can."""
    if importlib.util.find_spec("flwr") is None:
        return "FedAvg is left out: it needs Flower, which is not installed: pip install 'potluck[bench]'"
    return None


def run_fedavg(
    model_dir: Path,
    client_files: Sequence[Path],
    held_out: Sequence[Row],
    *,
    output: Path,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    max_length: int,
    seed: int,
    threads: int = 1,
    timeout_s: float = 3600.0,
) -> dict[str, Any]:
    """Train with FedAvg, one local epoch a round, and score the averaged adapter as every other scheme's.

    Args:
        model_dir: the model, in Hugging Face layout; clients and server each load it.
        client_files: a JSONL file a client.
        held_out: rows that no client has.
        output: where the adapter goes, in PEFT's format; must be empty or absent.
        epochs: rounds.
        batch_size: examples of a client's optimizer step.
        learning_rate: the highest; see :func:`potluck.bench.flower_app.train_epoch`.
        max_length: tokens an example may have.
        seed: draws the adapter and the order of examples.
        threads: of each client's process.
        timeout_s: seconds that a round, and the whole, may take at most.

    Returns:
        ``eval_loss`` (nats a target token) and ``eval_accuracy`` (None without answers) of the adapter read back from
        disk; ``adapter``, its directory; ``bytes_up`` and ``bytes_down``, payload of all clients in all rounds: the
        adapters' tensors as Flower serialises them, without its envelopes and HTTP; lists with an entry a client:
        ``client_active_s``, from the arrival of the first task to the end of the last (a client must be there for
        all rounds), ``client_compute_s``, the part of it in which the client's app ran, ``client_peak_rss_mib`` of
        the app and ``client_link_rss_mib`` of the SuperNode beside it; ``server_s``, CPU seconds of the server's app;
        ``wall_s``, all of it with the start of processes.

    Raises:
        BadInput: Flower is not installed, or a file or the model cannot be used.
        PotluckError: a process of Flower's ended, or the run failed or took too long; the message ends with what that
            process said last.
    """
    if (sentence := missing_flower()) is not None:
        raise BadInput(sentence)
    data = Data(train=["-"], max_length=max_length)
    examples = encode_for(model_dir, held_out, data)
    began = time.monotonic()
    with replace_directory(output, overwrite=False) as partial, tempfile.TemporaryDirectory() as scratch:
        run_config = {
            "model-dir": str(model_dir.absolute()),
            "output": scratch,
            "clients": len(client_files),
            "rounds": epochs,
            "batch-size": batch_size,
            "learning-rate": float(learning_rate),
            "max-length": max_length,
            "seed": seed,
            "threads": threads,
            "timeout-s": float(timeout_s),
        }
        link_rss_mib = _run_flower(Path(scratch), client_files, run_config, timeout_s)
        summary = json.loads((Path(scratch) / SUMMARY_FILE).read_text(encoding="utf-8"))
        for file in (Path(scratch) / ADAPTER).iterdir():
            (partial / file.name).write_bytes(file.read_bytes())
    wall_s = time.monotonic() - began
    scores = score(model_dir, output, examples, inference_dtype(model_dir))
    reports = summary["reports"]
    return {
        "adapter": str(output),
        "eval_loss": scores.loss,
        "eval_accuracy": scores.accuracy,
        **_totals(reports, len(client_files)),
        "client_link_rss_mib": link_rss_mib,
        "server_s": summary["server_s"],
        "wall_s": wall_s,
    }


def _totals(reports: Sequence[Mapping[str, float]], clients: int) -> dict[str, Any]:
    """Sums over rounds of what the clients reported after each."""
    of_client = [[report for report in reports if report["client"] == client] for client in range(clients)]
    return {
        "bytes_up": int(sum(report["bytes-up"] for report in reports)),
        "bytes_down": int(sum(report["bytes-down"] for report in reports)),
        "client_active_s": [max(r["ended"] for r in own) - min(r["began"] for r in own) for own in of_client],
        "client_compute_s": [sum(r["ended"] - r["began"] for r in own) for own in of_client],
        "client_peak_rss_mib": [max(r["peak-rss-mib"] for r in own) for own in of_client],
    }


@dataclass(frozen=True)
class _Running:
    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def last_said(self) -> str:
        return self.log.read_bytes()[-_SAID_BYTES:].decode(errors="replace").strip()


def _run_flower(
    scratch: Path, client_files: Sequence[Path], run_config: Mapping[str, Any], timeout_s: float
) -> list[float]:
    """One run from start to end; returns each SuperNode's peak memory in MiB."""
    app, home = scratch / "app", scratch / "flower"
    _write_app(app, run_config)
    link_port, *node_ports = _free_ports(1 + len(client_files))
    home.mkdir()
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{_CONNECTION}"\n\n[superlink.{_CONNECTION}]\n'
        f'address = "127.0.0.1:{link_port}"\ninsecure = true\n',
        encoding="utf-8",
    )
    with contextlib.ExitStack() as running:
        superlink = ["flower-superlink", "--insecure", "--disable-runtime-dependency-installation"]
        processes = [running.enter_context(_started("SuperLink", [*superlink, "--port", str(link_port)], scratch))]
        _wait_for_port(link_port, processes[0])
        nodes = []
        for client, (file, port) in enumerate(zip(client_files, node_ports, strict=True)):
            config = f"partition-id={client} rows={json.dumps(str(file.absolute()))}"
            command = ["flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{link_port}"]
            command += ["--port", str(port), "--node-config", config]
            nodes.append(running.enter_context(_started(f"SuperNode {client}", command, scratch)))
        run = running.enter_context(_started("run", ["flwr", "run", str(app), _CONNECTION, "--stream"], scratch))
        _wait_for_end(run, [*processes, *nodes], scratch / SUMMARY_FILE, timeout_s)
        return [memory_mib("VmHWM", node.process.pid) for node in nodes]


def _write_app(app: Path, run_config: Mapping[str, Any]) -> None:
    app.mkdir()
    (app / "bench_app.py").write_text(_APP, encoding="utf-8")
    values = "\n".join(f"{name} = {json.dumps(value)}" for name, value in run_config.items())  # TOML, for these types
    (app / "pyproject.toml").write_text(
        '[project]\nname = "potluck-fedavg"\nversion = "1.0.0"\ndescription = "FedAvg of LoRA adapters"\n'
        'license = "Apache-2.0"\ndependencies = []\n\n'
        '[tool.flwr.app]\npublisher = "potluck"\n\n'
        '[tool.flwr.app.components]\nserverapp = "bench_app:server_app"\nclientapp = "bench_app:client_app"\n\n'
        f"[tool.flwr.app.config]\n{values}\n",
        encoding="utf-8",
    )


@contextlib.contextmanager
def _started(name: str, command: Sequence[str], scratch: Path) -> Iterator[_Running]:
    """A process of Flower's with all that it starts, ended when the block ends."""
    scripts = sysconfig.get_path("scripts")
    log = scratch / f"{name.replace(' ', '-')}.log"
    environment = {  # Flower takes these in no other way
        **os.environ,
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", "")]),
        "FLWR_HOME": str(scratch / "flower"),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
    }
    with log.open("wb") as said:
        process = subprocess.Popen(
            [str(Path(scripts) / command[0]), *command[1:]],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=scratch,
            start_new_session=True,
        )
    try:
        yield _Running(name, process, log)
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
    with contextlib.suppress(ProcessLookupError):  # what it started outlives it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _wait_for_port(port: int, server: _Running, within_s: float = 60.0) -> None:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=1):
                return
        except OSError:
            time.sleep(0.1)
    raise PotluckError(f"Flower's {server.name} did not start: {server.last_said()}")


def _wait_for_end(run: _Running, others: Sequence[_Running], summary: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while run.process.poll() is None and not summary.exists():
        for other in others:
            if (code := other.process.poll()) is not None:
                raise PotluckError(f"Flower's {other.name} ended with {code}: {other.last_said()}")
        if time.monotonic() > deadline:
            raise PotluckError(f"FedAvg did not end within {timeout_s:.0f} s: {run.last_said()}")
        time.sleep(0.2)
    if not summary.exists():
        said = "\n".join(process.last_said() for process in (*others, run))
        raise PotluckError(f"FedAvg's run failed: {said}")
