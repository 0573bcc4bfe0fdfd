"""A split server and its clients as threads of one process, over real sockets; what passes can be looked at."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.job import Job
from potluck.split.client import Client, Contributed, contribute
from potluck.split.listener import SplitListener
from potluck.split.messages import unpack
from potluck.split.result import Outcome
from potluck.split.serve import Serving, serve
from potluck.split.traffic import Traffic
from potluck.split.uplink import Uplink
from word_model import save_word_model

VOCAB = 512
FIRST_USED = 300
"""Tokens of the texts have ids from here on, so that no index, length or channel of a small message is one."""
WORDS = ["<eos>", *(f"w{i}" for i in range(1, VOCAB))]


def save_model(directory: Path, **differs: object) -> Path:
    return save_word_model(directory, WORDS, **{"num_hidden_layers": 3, **differs})


def some_texts(count: int, seed: int, words: tuple[int, int] = (4, 9), used: int = 40) -> list[dict[str, str]]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(*words, (count,), generator=draw).tolist()
    return [
        {"text": " ".join(f"w{FIRST_USED + int(i)}" for i in torch.randint(used, (length,), generator=draw))}
        for length in lengths
    ]


def write(path: Path, rows: Sequence[Mapping[str, str]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def step_job(directory: Path, split: Mapping[str, Any], **fields: Any) -> Job:
    content = {
        "model": str(directory / "model"),
        "output": directory / "adapter",
        "dtype": "fp32",
        "threads": 1,
        "epochs": 2,
        "batch_size": 8,
        "learning_rate": 0.01,
        "lora": {"rank": 4},
        "split": {"cut": 1, "encoding": "fp32", "negatives": VOCAB, **split},
    }
    return Job.model_validate(content | fields)


class Told(SplitListener):
    """Keeps what the server tells; the invite is waited for."""

    def __init__(self) -> None:
        self.invite: Future[str] = Future()
        self.texts: list[str] = []
        self.losses: list[float] = []
        self.begun = threading.Event()

    def invited(self, invite: str, scheme: str) -> None:
        self.invite.set_result(invite)

    def tell(self, text: str) -> None:
        self.texts.append(text)

    def step(self, step: int, steps: int, loss: float, step_s: float) -> None:
        self.losses.append(loss)
        self.begun.set()


@dataclass
class Ran:
    outcome: Outcome | None = None
    error: BaseException | None = None
    told: Told = field(default_factory=Told)
    clients: dict[str, Contributed] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)


def start_server(job: Job, home: Path, clients: int, told: Told, pool: ThreadPoolExecutor) -> "Future[Outcome | None]":
    serving = Serving(train_when=clients, address="127.0.0.1", home=home)
    future = pool.submit(serve, job, serving, listener=told, until=lambda outcome: outcome is not None)
    future.add_done_callback(lambda done: _hand_on(done, told.invite))
    return future


def contribute_as(name: str, *args: Any, **kwargs: Any) -> Contributed:
    """In a thread that has the client's name."""
    threading.current_thread().name = name
    return contribute(*args, **kwargs)


def _hand_on(done: "Future[Outcome | None]", invite: "Future[str]") -> None:
    if not invite.done():
        invite.set_exception(done.exception() or AssertionError("no invite"))


def client_of(directory: Path, name: str, **differs: Any) -> Client:
    home = directory / f"home-{name}"
    options = {"model": str(directory / "model"), "send_ids": True, "home": home, "spool": home / "spool"}
    return Client(name=name, **{**options, "patience_s": 2.0, **differs})


def run(job: Job, directory: Path, own: Mapping[str, Sequence[Mapping[str, str]]], holdout: str = "0") -> Ran:
    """Serve until trained, every client in a thread of its own."""
    ran = Ran()
    with ThreadPoolExecutor() as pool:
        server = start_server(job, directory / "server", len(own), ran.told, pool)
        invite = ran.told.invite.result(60)
        contributing = {
            name: pool.submit(
                contribute_as,
                name,
                invite,
                [write(directory / f"{name}.jsonl", rows)],
                client_of(directory, name, holdout=holdout),
                traffic=Traffic(),
            )
            for name, rows in own.items()
        }
        for name, future in contributing.items():
            if error := future.exception(120):
                ran.errors[name] = error
            else:
                ran.clients[name] = future.result()
        ran.error = server.exception(120)
        ran.outcome = None if ran.error else server.result()
    return ran


@dataclass(frozen=True)
class Passed:
    """One message of a client, as it went over the wire, and its answer."""

    client: str
    body: bytes
    answer: bytes

    @property
    def words(self) -> dict[str, Any]:
        return unpack(self.body)[0]

    @property
    def tensors(self) -> dict[str, Tensor]:
        return unpack(self.body)[1]

    @property
    def answered(self) -> dict[str, Tensor]:
        return unpack(self.answer)[1]


@contextmanager
def recorded() -> Iterator[list[Passed]]:
    """Every message of connected clients in this process; its client is the thread that sent it."""
    passed: list[Passed] = []
    real = Uplink.step

    def step(self: Uplink, number: int, body: bytes, *args: Any, **kwargs: Any) -> bytes:
        answer = real(self, number, body, *args, **kwargs)
        passed.append(Passed(threading.current_thread().name, body, answer))
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Uplink, "step", step)
        yield passed
