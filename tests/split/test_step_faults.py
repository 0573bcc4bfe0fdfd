"""What goes wrong while clients are connected: who leaves is passed over, who sends garbage is refused."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from step_worlds import Ran, Told, client_of, contribute_as, run, save_model, some_texts, start_server, step_job, write
from torch import Tensor

from potluck.errors import BadInput, DeviceLost
from potluck.split import serve, step_talk
from potluck.split.client import Contributed, contribute
from potluck.split.door import SplitDoor
from potluck.split.messages import pack, unpack
from potluck.split.result import Outcome
from potluck.split.step_table import StepTable
from potluck.split.uplink import Uplink

OWN = {name: some_texts(6, seed) for seed, name in enumerate(("ann", "bob", "cat"))}
Change = Callable[[dict[str, Any], dict[str, Tensor]], bytes]


class Vanished(Exception):
    """A process that is killed says nothing."""


@pytest.fixture(autouse=True)
def model(tmp_path: Path) -> None:
    save_model(tmp_path / "model")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "StepTable", partial(StepTable, silent_s=1.5))
    monkeypatch.setattr(step_talk, "_SIGN_OF_LIFE_S", 0.1)


def meddle(monkeypatch: pytest.MonkeyPatch, who: tuple[str, ...], do: str, change: Change, nth: int = 2) -> None:
    """Have the n-th message of a kind of some clients changed."""
    seen = dict.fromkeys(who, 0)
    real = Uplink.step

    def step(self: Uplink, number: int, body: bytes, *args: Any, **kwargs: Any) -> bytes:
        name = threading.current_thread().name
        if name in who:
            words, tensors = unpack(body)
            seen[name] += words["do"] == do
            if words["do"] == do and seen[name] == nth:
                body = change(words, tensors)
        return real(self, number, body, *args, **kwargs)

    monkeypatch.setattr(Uplink, "step", step)


def vanish(words: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    raise Vanished


def all_but_first_slow(names: Iterable[object]) -> list[Any]:
    """Each takes seconds, and is alike for the others."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


LEAVING = [
    ("u-shaped", "trainable", "gradient"),
    pytest.param("l-shaped", "trainable", "average", marks=pytest.mark.slow),
    pytest.param("l-shaped", "frozen", "step", marks=pytest.mark.slow),
    pytest.param("u-shaped", "frozen", "step", marks=pytest.mark.slow),
]


def job_of(tmp_path: Path, scheme: str, client: str) -> Any:
    return step_job(tmp_path, {"scheme": scheme, "client": client, "average_every": 1}, batch_size=6)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("scheme", "client", "at"), LEAVING)
def test_who_vanishes_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, client: str, at: str
) -> None:
    meddle(monkeypatch, ("cat",), at, vanish)
    ran = run(job_of(tmp_path, scheme, client), tmp_path, OWN, holdout="1")
    assert ran.error is None
    assert ran.errors.keys() == {"cat"}
    assert isinstance(ran.errors["cat"], Vanished)
    assert "cat has left in step 2; training goes on without it." in ran.told.texts
    assert_trained_by_the_others(ran)
    assert ran.outcome is not None
    assert "cat" in ran.outcome.before


def assert_trained_by_the_others(ran: Ran) -> None:
    assert ran.outcome is not None
    assert len(ran.told.losses) == ran.outcome.steps == 6
    assert set(ran.outcome.after) == {"overall", "ann", "bob"}
    assert (Path(ran.outcome.adapter) / "adapter_model.safetensors").is_file()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("scheme", "client", "at"), LEAVING)
def test_when_all_have_vanished_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, client: str, at: str
) -> None:
    meddle(monkeypatch, tuple(OWN), at, vanish)
    job = job_of(tmp_path, scheme, client)
    ran = run(job, tmp_path, OWN)
    assert isinstance(ran.error, DeviceLost)
    assert str(ran.error) == "Every client has left by step 2 of 6: nothing was saved."
    assert not job.output.exists()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("scheme", "at"), [("u-shaped", "gradient"), ("l-shaped", "average")])
def test_all_gone_in_the_last_step_is_nothing_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, at: str
) -> None:
    meddle(monkeypatch, tuple(OWN), at, vanish, nth=6)
    job = job_of(tmp_path, scheme, "trainable")
    ran = run(job, tmp_path, OWN)
    assert isinstance(ran.error, DeviceLost)
    assert not job.output.exists()


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda words, tensors: pack(words, {**tensors, name: change(tensors[name])})


def _unsupervised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"supervised": torch.zeros_like(tensors["supervised"]), "targets_N": tensors["targets_N"][:0]}


GARBAGE: dict[str, tuple[str, str, Change, str]] = {
    "NaN": ("l-shaped", "step", with_tensor("x_RD", lambda x: x * float("nan")), "x_RD holds NaN"),
    "no message": ("l-shaped", "step", lambda words, tensors: b"\x08" + bytes(99), "is damaged"),
    "another message": ("l-shaped", "step", lambda w, t: pack({"do": "sing"}, t), "expected another message"),
    "half of the rows": ("l-shaped", "step", with_tensor("x_RD", lambda x: x[1:]), "x_RD is not"),
    "square lengths": ("l-shaped", "step", with_tensor("lengths_B", lambda x: x.view(-1, 1)), "lacks lengths"),
    "a target beyond": ("l-shaped", "step", with_tensor("targets_N", lambda x: x + 1000), "target .* outside"),
    "an endless gradient": ("u-shaped", "gradient", with_tensor("gradient_ND", lambda g: g * 1e30), "beyond"),
    "a loss that is none": ("u-shaped", "gradient", lambda w, t: pack({**w, "loss": "low"}, t), "a loss"),
    "no adapter": ("u-shaped", "average", lambda w, t: pack(w, {}), "is not numbers of shape"),
    "eight bits": ("u-shaped", "gradient", with_tensor("gradient_ND", lambda g: g.to(torch.float8_e5m2)), "numbers"),
    "nothing to judge by": ("l-shaped", "judge", lambda w, t: pack(w, t | _unsupervised(t)), "no supervised position"),
}


@pytest.mark.parametrize("garbage", all_but_first_slow(GARBAGE))
def test_garbage_is_refused_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, garbage: str
) -> None:
    if garbage == "no message":  # which the thread that trains never sees
        request.getfixturevalue("impatient")
    scheme, at, change, message = GARBAGE[garbage]
    meddle(monkeypatch, ("cat",), at, change)
    ran = run(job_of(tmp_path, scheme, "trainable"), tmp_path, OWN, holdout="1")
    assert ran.errors.keys() == {"cat"}, ran.errors
    with pytest.raises(BadInput, match=f"The server ended this client's part: .*{message}"):
        raise ran.errors["cat"]
    assert_trained_by_the_others(ran)


VERDICTS: list[object] = [
    [[1.0, True, 3]] * 2,
    None,
    [],
    [[float("nan"), True, 3]],
    [[1.0, True, 0]],
    [[1.0, 1, 3]],
]


@pytest.mark.parametrize(
    "verdicts",
    all_but_first_slow(VERDICTS),
    ids=str,
)
def test_a_verdict_that_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verdicts: object
) -> None:
    meddle(monkeypatch, ("cat",), "verdict", lambda w, t: pack({**w, "examples": verdicts}, t))
    ran = run(step_job(tmp_path, {"scheme": "u-shaped"}, steps=1), tmp_path, OWN, holdout="1")
    assert "loss, rightness and targets" in str(ran.errors["cat"])
    assert ran.outcome is not None
    assert set(ran.outcome.after) == {"overall", "ann", "bob"}


TABLES: dict[str, Change] = {
    "more than the vocabulary": with_tensor("table/rows_UD", lambda x: x.repeat(200, 1)),
    "another encoding": with_tensor("table/rows_UD", lambda x: x.half()),
    "a number": with_tensor("table/rows_UD", lambda x: x[0, 0]),
    "infinite": with_tensor("negatives/rows_UD", lambda x: x / 0),
    "no examples": lambda w, t: pack({**w, "examples": 0}, t),
    "endless examples": lambda w, t: pack({**w, "examples": 1 << 39}, t),
}


@pytest.mark.parametrize("table", all_but_first_slow(TABLES))
def test_who_begins_with_garbage_is_refused_and_may_begin_again(tmp_path: Path, table: str) -> None:
    with world(tmp_path, {"scheme": "l-shaped"}, 1) as (_, server, contributing):
        with pytest.MonkeyPatch.context() as patch:
            meddle(patch, ("ann",), "begin", TABLES[table], nth=1)
            with pytest.raises(BadInput, match="The server ended this client's part: "):
                contributing("ann").result(60)
        contributing("ann").result(60)
        assert clients_of(server) == ("ann",)


def test_nothing_can_be_kept_where_nothing_is_uploaded(tmp_path: Path) -> None:
    with world(tmp_path, {"scheme": "l-shaped"}, 1) as (told, _, contributing):
        keeping = replace(client_of(tmp_path, "ann"), keep=tmp_path / "kept")
        with pytest.raises(BadInput, match="--keep is for one-shot: this server's scheme is l-shaped"):
            contribute(told.invite.result(), [write(tmp_path / "ann.jsonl", OWN["ann"])], keeping)
        contributing("ann").result(60)


Contributing = Callable[[str], "Future[Contributed]"]


@contextmanager
def world(
    tmp_path: Path, split: dict[str, Any], clients: int
) -> Iterator[tuple[Told, "Future[Outcome | None]", Contributing]]:
    """A server that waits for so many clients, and what starts one of them in a thread."""
    told = Told()
    with ThreadPoolExecutor() as pool:
        server = start_server(step_job(tmp_path, split), tmp_path / "server", clients, told, pool)
        invite = told.invite.result(60)

        def contributing(name: str) -> "Future[Contributed]":
            data = write(tmp_path / f"{name}.jsonl", OWN[name])
            return pool.submit(contribute_as, name, invite, [data], client_of(tmp_path, name))

        yield told, server, contributing


def clients_of(server: "Future[Outcome | None]") -> tuple[str, ...]:
    outcome = server.result(60)
    assert outcome is not None
    return outcome.clients


def wait_until_taken(told: Told, name: str, times: int = 1) -> None:
    for _ in range(600):
        if sum(text.startswith(f"{name} takes part") for text in told.texts) == times:
            return
        threading.Event().wait(0.1)
    raise AssertionError(told.texts)


def test_two_processes_of_one_client_the_second_is_told(tmp_path: Path) -> None:
    with world(tmp_path, {"scheme": "u-shaped", "client": "trainable"}, 2) as (told, server, contributing):
        first = contributing("ann")
        wait_until_taken(told, "ann")
        with pytest.raises(BadInput, match=r"ann takes part already, or did until it left: .* another name"):
            contributing("ann").result(60)
        contributing("bob").result(60)
        assert first.result(60).examples == 6
        assert clients_of(server) == ("ann", "bob")


@pytest.mark.usefixtures("impatient")
def test_who_vanished_while_others_are_waited_for_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = threading.Event()
    real = Uplink.ask

    def ask(self: Uplink, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        if gone.is_set() and threading.current_thread().name == "ann" and method == "GET":
            raise Vanished
        return real(self, method, path, *args, **kwargs)

    monkeypatch.setattr(Uplink, "ask", ask)
    monkeypatch.setattr(serve, "SplitDoor", partial(SplitDoor, slice_s=0.2))
    with world(tmp_path, {"scheme": "l-shaped"}, 2) as (told, server, contributing):
        first = contributing("ann")
        wait_until_taken(told, "ann")
        gone.set()
        with pytest.raises(Vanished):
            first.result(60)
        gone.clear()
        threading.Event().wait(2.5)
        again = contributing("ann")
        wait_until_taken(told, "ann", 2)
        contributing("bob").result(60)
        again.result(60)
        assert clients_of(server) == ("ann", "bob")


def test_who_comes_too_late_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    meddle(monkeypatch, ("ann",), "step", lambda w, t: (hold.wait(60), pack(w, t))[1], nth=2)
    with world(tmp_path, {"scheme": "l-shaped"}, 2) as (told, server, contributing):
        running = [contributing("ann"), contributing("bob")]
        assert told.begun.wait(60)
        with pytest.raises(BadInput, match="Training has begun, or gone on, without this client"):
            contributing("cat").result(60)
        hold.set()
        for one in running:
            one.result(60)
        assert clients_of(server) == ("ann", "bob")


def test_a_message_that_is_sent_again_is_taken_once(tmp_path: Path) -> None:
    """The same clients train twice, once with every message sent three times: bit for bit the same."""
    adapters = []
    for again in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            if again:
                patch.setattr(Uplink, "step", _thrice(Uplink.step))
            split = {"scheme": "u-shaped", "client": "trainable"}
            ran = run(step_job(tmp_path, split, output=tmp_path / f"{again}"), tmp_path, OWN)
        assert (ran.error, ran.errors) == (None, {})
        adapters.append(load_file(tmp_path / f"{again}" / "adapter_model.safetensors"))
    assert adapters[0].keys() == adapters[1].keys()
    assert all(torch.equal(adapters[0][name], adapters[1][name]) for name in adapters[0])


def _thrice(real: Callable[..., bytes]) -> Callable[..., bytes]:
    def step(*args: Any, **kwargs: Any) -> bytes:
        answers = {real(*args, **kwargs) for _ in range(3)}
        assert len(answers) == 1
        return answers.pop()

    return step
