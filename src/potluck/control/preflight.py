"""Before a group is made: can every device reach every other, at the addresses the group will use?"""

import ipaddress
import json
import secrets
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from torch.distributed import Store  # type: ignore[attr-defined]

from potluck.control.address import interface_of
from potluck.errors import BadInput, PotluckError

_NONCE_BYTES = 16
_AT = "preflight/at/{}"
_FOUND = "preflight/found/{}"


@dataclass(frozen=True)
class _Place:
    """Where a device listens; ``fault`` says why it cannot."""

    address: str
    port: int = 0
    interface: str = ""
    fault: str = ""

    def __str__(self) -> str:
        return f"({self.interface}, {self.address})"


def check_paths(store: Store, rank: int, names: Sequence[str], address: str, timeout_s: float = 5.0) -> None:
    """Try a TCP connection between every two devices, each way, and swap 16 random bytes over it.

    Every device calls this at the same time; either all return, or all raise the same sentence. Each listens on a
    free port of exactly ``address`` meanwhile.

    Args:
        store: shared by the devices; it waits for the slowest of them.
        rank: of this device.
        names: of all devices, by rank.
        address: numeric, of this device; the one its group is going to use.
        timeout_s: for one connection.

    Raises:
        PotluckError: two devices cannot reach each other; names both with interface and address.
        DeviceLost: a device did not take part.
    """
    with _listening(address, timeout_s) as own:
        store.set(_AT.format(rank), json.dumps(asdict(own)))
        places = [_Place(**json.loads(store.get(_AT.format(other)))) for other in range(len(names))]
        fault = _fault_of_places(places, names)
        unreached: dict[int, str] = {}
        if fault is None:
            others = [other for other in range(len(names)) if other != rank]
            with ThreadPoolExecutor(max_workers=max(1, len(others))) as threads:
                reasons = threads.map(lambda other: _reach(places[other], timeout_s), others)
                unreached = {other: reason for other, reason in zip(others, reasons, strict=True) if reason}
        # the others may still connect here: nobody stops listening before all have tried
        store.set(_FOUND.format(rank), json.dumps(list(unreached.items())))
        found = [json.loads(store.get(_FOUND.format(other))) for other in range(len(names))]
    if fault is None:
        fault = _fault_of_connections(found, places, names)
    if fault is not None:
        raise PotluckError(fault)


def _fault_of_places(places: Sequence[_Place], names: Sequence[str]) -> str | None:
    for place, name in zip(places, names, strict=True):
        if place.fault:
            return f"{name} cannot listen on {place.address}: {place.fault}."
    loopback = [ipaddress.ip_address(place.address).is_loopback for place in places]
    if any(loopback) and not all(loopback):
        here, there = loopback.index(True), loopback.index(False)
        return (
            f"{names[here]} gave {places[here]}, which only {names[here]} itself can reach, while {names[there]} is at "
            f"{places[there]}: connect both to one network, or name an address of it with --address."
        )
    return None


def _fault_of_connections(
    found: Sequence[list[tuple[int, str]]], places: Sequence[_Place], names: Sequence[str]
) -> str | None:
    failed = [(rank, other, reason) for rank, unreached in enumerate(found) for other, reason in unreached]
    if not failed:
        return None
    rank, other, reason = failed[0]
    more = f" {len(failed) - 1} other connections failed too." if len(failed) > 1 else ""
    return (
        f"{names[rank]} {places[rank]} cannot reach {names[other]} {places[other]}: {reason}. Is a firewall between "
        f"them, or are they on different networks? Potluck needs TCP on all ports between the devices.{more}"
    )


@contextmanager
def _listening(address: str, timeout_s: float) -> Iterator[_Place]:
    """Answer connections for the length of a block."""
    try:
        interface = interface_of(address)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family)
    except (OSError, BadInput) as error:
        yield _Place(address, fault=str(error).rstrip("."))
        return
    ended = threading.Event()
    thread = threading.Thread(target=_answer, args=(listener, timeout_s, ended), daemon=True)
    thread.start()
    try:
        yield _Place(address, listener.getsockname()[1], interface)
    finally:
        ended.set()
        thread.join()
        listener.close()


def _answer(listener: socket.socket, timeout_s: float, ended: threading.Event) -> None:
    listener.settimeout(0.05)
    with ThreadPoolExecutor(max_workers=32) as threads:
        while not ended.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                continue
            threads.submit(_echo, connection, timeout_s)


def _echo(connection: socket.socket, timeout_s: float) -> None:
    with connection:
        try:
            connection.settimeout(timeout_s)
            connection.sendall(_received(connection))
        except OSError:
            pass  # whoever it was learns it from the closed connection


def _reach(place: _Place, timeout_s: float) -> str:
    """Why ``place`` cannot be reached; empty if it can."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    try:
        with socket.create_connection((place.address, place.port), timeout=timeout_s) as connection:
            connection.sendall(nonce)
            return "" if _received(connection) == nonce else "something else answers there"
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()


def _received(connection: socket.socket) -> bytes:
    content = b""
    while len(content) < _NONCE_BYTES:
        part = connection.recv(_NONCE_BYTES - len(content))
        if not part:
            raise ConnectionResetError("the connection was closed")
        content += part
    return content
