"""Ranks are threads; the machine's loopback addresses stand for networks."""

import json
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from potluck.control import preflight
from potluck.control.preflight import check_paths
from potluck.errors import PotluckError

NAMES = ["hub", "cam-1", "cam-2"]


def run(addresses: Sequence[str], timeout_s: float = 0.5) -> list[str | None]:
    """What each device was told."""
    store = dist.HashStore()

    def body(rank: int) -> str | None:
        try:
            check_paths(store, rank, NAMES[: len(addresses)], addresses[rank], timeout_s)
        except PotluckError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(len(addresses)) as threads:
        return list(threads.map(body, range(len(addresses))))


def test_devices_that_reach_each_other_pass() -> None:
    assert run(["127.0.0.1"] * 3) == [None] * 3
    assert run(["127.0.0.1"]) == [None]


def test_ipv6() -> None:
    if not any(each.address == "::1" for each in psutil.net_if_addrs().get("lo", [])):
        pytest.skip("this machine has no ::1")
    assert run(["::1"] * 2) == [None] * 2


def test_it_listens_on_exactly_the_address() -> None:
    with preflight._listening("127.0.0.1", 0.5) as place:
        mine = psutil.Process().net_connections(kind="inet")
        assert [c.laddr.ip for c in mine if c.status == psutil.CONN_LISTEN and c.laddr.port == place.port] == [
            "127.0.0.1"
        ]


def test_all_devices_say_the_same_of_a_closed_way(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = preflight._reach
    closed = preflight._Place("127.0.0.1", port=9, interface="lo")

    def walled(place: preflight._Place, timeout_s: float) -> str:
        # one device's way to another leads to a port where nobody listens
        return reach(closed if place.port == blocked else place, timeout_s)

    monkeypatch.setattr(preflight, "_reach", walled)
    blocked = -1
    store_set = dist.HashStore.set

    def remember(self: dist.HashStore, key: str, value: str) -> None:
        nonlocal blocked
        if key == "preflight/at/0":
            blocked = json.loads(value)["port"]
        store_set(self, key, value)

    monkeypatch.setattr(dist.HashStore, "set", remember)
    told = run(["127.0.0.1"] * 3)
    assert len(set(told)) == 1
    sentence = told[0] or ""
    assert sentence.startswith("cam-1 (lo, 127.0.0.1) cannot reach hub (lo, 127.0.0.1): connection refused.")
    assert "firewall" in sentence
    assert "1 other connections failed too" in sentence


def test_somebody_who_does_not_answer_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        place = preflight._Place("127.0.0.1", deaf.getsockname()[1], "lo")
        assert preflight._reach(place, 0.2) == "no answer within 0.2 s"


def test_a_loopback_address_among_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    outside = [
        each.address
        for entries in psutil.net_if_addrs().values()
        for each in entries
        if each.family == socket.AF_INET and not each.address.startswith("127.")
    ]
    if not outside:
        pytest.skip("this machine is on no network")
    told = run([outside[0], "127.0.0.1"])
    assert len(set(told)) == 1
    assert "cam-1 gave (lo, 127.0.0.1), which only cam-1 itself can reach, while hub is at" in (told[0] or "")


def test_an_address_of_another_machine_is_told_by_all() -> None:
    told = run(["127.0.0.1", "203.0.113.9"])
    assert len(set(told)) == 1
    assert "cam-1 cannot listen on 203.0.113.9: 203.0.113.9 is no address of this machine" in (told[0] or "")
