import socket
from collections import namedtuple
from typing import Any

import psutil
import pytest

from potluck.control import address
from potluck.control.address import address_towards, interface_of, listening_address
from potluck.errors import BadInput

Entry = namedtuple("Entry", "family address")
V4, V6 = socket.AF_INET, socket.AF_INET6


def machine(monkeypatch: pytest.MonkeyPatch, routes: dict[str, str], **interfaces: list[tuple[Any, str]]) -> None:
    """A machine with these interfaces, whose packets to a target leave from ``routes[target]``."""
    table = {name: [Entry(*entry) for entry in entries] for name, entries in interfaces.items()}
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: table)
    monkeypatch.setattr(address, "_routed", lambda _, target: routes.get(target))


LOOPBACK = [(V4, "127.0.0.1"), (V6, "::1")]


def test_the_default_route_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    two = {"eth0": [(V4, "10.0.0.3")], "eth1": [(V4, "10.1.0.3"), (V6, "fe80::2%eth1")]}
    machine(monkeypatch, {"198.51.100.1": "10.1.0.3"}, lo=LOOPBACK, **two)
    assert listening_address(None) == "10.1.0.3"
    assert listening_address("10.0.0.3") == "10.0.0.3"
    with pytest.raises(BadInput, match=r"--address 10.9.0.3 is no address.*10.0.0.3 \(eth0\), 10.1.0.3 \(eth1\)"):
        listening_address("10.9.0.3")
    with pytest.raises(BadInput, match="'hub' is no IPv4"):
        listening_address("hub")
    machine(monkeypatch, {}, lo=LOOPBACK, **two)
    with pytest.raises(BadInput, match=r"several addresses and no default route.*--address: 10.0.0.3 \(eth0\)"):
        listening_address(None)


def test_a_machine_with_ipv6_only(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {"2001:db8::1": "fd00::5"}, lo=LOOPBACK, eth0=[(V6, "fd00::5"), (V6, "fe80::5%eth0")])
    assert listening_address(None) == "fd00::5"
    assert listening_address("FD00:0:0::5") == "fd00::5"
    assert interface_of("[fd00::5]") == "eth0"


def test_without_a_default_route_the_only_address(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {}, lo=LOOPBACK, veth=[(V4, "10.0.0.3"), (V6, "fe80::5%veth")])
    assert listening_address(None) == "10.0.0.3"
    machine(monkeypatch, {}, lo=LOOPBACK)
    with pytest.raises(BadInput, match="is on no network"):
        listening_address(None)


def test_the_address_towards_a_peer() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(BadInput, match="no address, and no name"):
        address_towards("no-such-host.invalid")


def test_no_route_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, {}, lo=LOOPBACK, eth0=[(V4, "10.0.0.3")])
    with pytest.raises(BadInput, match=r"no route from this machine to 10\.7\.0\.1; its addresses are .*10\.0\.0\.3"):
        address_towards("10.7.0.1")


def test_this_machine() -> None:
    assert interface_of("127.0.0.1").startswith("lo")
    assert listening_address("127.0.0.1") == "127.0.0.1"
    with pytest.raises(BadInput, match="is no address of this machine"):
        interface_of("203.0.113.77")
    with pytest.raises(BadInput, match=r"--address 0\.0\.0\.0 is no address"):
        listening_address("0.0.0.0")
