"""The store over the front door, and Gloo over the store."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import httpx
import pytest
import torch
from doors import LOCAL, join, open_door

from potluck.chain.comm import Comm, gloo_group
from potluck.control.client import Client
from potluck.control.front_door import FrontDoor
from potluck.control.identity import Identity
from potluck.control.store import ControlStore
from potluck.errors import BadInput, DeviceLost


@pytest.fixture
def door(identity: Identity) -> Iterator[FrontDoor]:
    with open_door(identity, places=2) as opened:
        yield opened


@pytest.fixture
def clients(door: FrontDoor) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        access = [Client(door.access), join(door.invite, "a"), join(door.invite, "b")]
        yield [stack.enter_context(client) for client in access]


@pytest.mark.timing
def test_what_a_store_promises(door: FrontDoor, clients: list[Client]) -> None:
    generation = door.new_generation()
    a, b = (ControlStore(client, generation, timeout_s=0.3) for client in clients[:2])
    key = "0/å ?#%2F/../x"
    a.set(key, bytes(range(256)))
    assert b.get(key) == bytes(range(256))
    a.set("text", "värde")
    assert b.get("text") == "värde".encode()
    assert a.add("n", 2) == 2
    assert b.add("n", -5) == -3
    assert b.check([key, "text", "n"])
    assert not b.check([key, "absent"])
    assert a.compare_set("lock", "", "mine") == b"mine"
    assert b.compare_set("lock", "", "yours") == b"mine"
    assert b.compare_set("lock", "mine", "yours") == b"yours"
    assert a.compare_set("absent", "x", "y") == b"x"
    assert a.delete_key("text")
    assert not b.delete_key("text")
    a.wait([key], timedelta(seconds=0))
    for call in (lambda: a.get("absent"), lambda: b.wait([key, "absent"], timedelta(seconds=0.2))):
        start = time.monotonic()
        with pytest.raises(DeviceLost, match="no absent in the store"):
            call()
        assert 0.15 < time.monotonic() - start < 1.0
    a.set("text", "x")
    with pytest.raises(BadInput, match="text is no number"):
        a.add("text", 1)


@pytest.mark.timing
def test_a_value_wakes_who_waits_for_it(door: FrontDoor, clients: list[Client]) -> None:
    generation = door.new_generation()
    later = threading.Timer(0.2, clients[1].store_set, (generation, "late", b"here"))
    later.start()
    start = time.monotonic()
    assert clients[0].store_get(generation, "late", wait_s=5) == b"here"
    assert time.monotonic() - start < 0.5
    later.join()


def test_a_new_generation_begins_with_nothing_and_ends_the_one_before(door: FrontDoor, clients: list[Client]) -> None:
    first = door.new_generation()
    old = ControlStore(clients[0], first)
    old.set("a", "1")
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(old.get, "never")
        time.sleep(0.1)
        second = door.new_generation()
        assert second == first + 1
        with pytest.raises(BadInput, match=f"Generation {first} of this pool is over"):
            waiting.result(timeout=5)
    assert not ControlStore(clients[1], second).check(["a"])
    with pytest.raises(BadInput, match="is over"):
        old.set("a", "2")


def test_an_addition_whose_answer_was_lost_counts_once(door: FrontDoor, clients: list[Client]) -> None:
    generation = door.new_generation()
    send, lost = clients[0]._http.request, iter([True])

    def lossy(*arguments: object, **options: object) -> httpx.Response:
        response = send(*arguments, **options)  # type: ignore[arg-type]
        if next(lost, False):
            raise httpx.ReadError("the answer was lost")
        return response

    clients[0]._http.request = lossy  # type: ignore[method-assign,assignment]
    assert clients[0].store_add(generation, "n", 3) == 3


def on_all(count: int, body: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(body, range(count)))


def test_gloo_over_the_store_and_again_in_the_next_generation(door: FrontDoor, clients: list[Client]) -> None:
    for _ in range(2):
        generation = door.new_generation()

        def body(rank: int, generation: int = generation) -> torch.Tensor:
            group = gloo_group(ControlStore(clients[rank], generation), rank, 3, LOCAL, timeout_s=10)
            return Comm(group).all_reduce(torch.full((5,), float(10**rank))).wait()

        for answer in on_all(3, body):
            assert torch.equal(answer, torch.full((5,), 111.0))


def test_gloo_tells_when_a_device_never_came(door: FrontDoor, clients: list[Client]) -> None:
    generation = door.new_generation()
    with pytest.raises(DeviceLost, match="did not answer within"):
        gloo_group(ControlStore(clients[0], generation), 0, 2, LOCAL, timeout_s=0.5)
