"""Ranks as threads of one process, over a real store."""

import socket
import threading
import time

import pytest

from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.pool import ranks
from potluck.pool.ranks import Launch, Ranks


def both() -> tuple[Ranks, Ranks]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    first, second = (Launch(rank, 2, 1, "127.0.0.1", port) for rank in (0, 1))
    return Ranks(first), Ranks(second)


def test_what_is_said_is_heard_when_it_comes() -> None:
    first, second = both()
    threading.Timer(0.2, first.say, ["task/0", {"do": "this"}]).start()
    assert second.hear("task/0") == {"do": "this"}


def test_a_good_end_is_no_error() -> None:
    first, second = both()
    leading = threading.Thread(target=first.end, args=[None])
    leading.start()
    assert second.hear("task/0") is None
    assert leading.is_alive(), "rank 0 serves the store until the others know"
    second.end(None)
    leading.join(timeout=2)
    assert not leading.is_alive()


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (BadInput("data.jsonl is empty."), BadInput, "^data.jsonl is empty.$"),
        (PotluckError("the loss is nan."), PotluckError, "^rank-1: the loss is nan.$"),
        (KeyboardInterrupt(), PotluckError, "^rank-1 was interrupted.$"),
        (SystemExit(143), PotluckError, "^rank-1 was interrupted.$"),
        (ZeroDivisionError("x"), PotluckError, r"^rank-1 failed \(ZeroDivisionError\)\.$"),
    ],
)
def test_the_first_error_is_what_the_others_hear(error: BaseException, kind: type[PotluckError], sentence: str) -> None:
    first, second = both()
    second.end(error)
    with pytest.raises(kind, match=sentence):
        first.hear("said/0/1")
    with pytest.raises(kind, match=sentence):
        first.cause()
    first.end(DeviceLost("the connection broke."))
    with pytest.raises(kind, match=sentence):
        second.hear("task/1")


@pytest.mark.timing
def test_a_rank_that_died_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_FAREWELL_S", 0.2)
    first, _ = both()
    began = time.monotonic()
    first.end(DeviceLost("rank-1 was killed."))
    assert 0.2 <= time.monotonic() - began < 2


def test_no_store_no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_CONNECT_S", 0.0)
    monkeypatch.setattr(ranks, "_TRY_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(DeviceLost, match=f"launcher's store at 127.0.0.1:{port} does not answer"):
        Ranks(Launch(1, 2, 1, "127.0.0.1", port))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(DeviceLost, match="launcher's store"):
        Ranks(Launch(0, 2, 1, "127.0.0.1", taken.getsockname()[1]))
