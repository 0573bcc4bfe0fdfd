"""Whom a client trusts, and what it does when the network breaks."""

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from doors import LOCAL, join, open_door

from potluck.control.client import Client, _batches
from potluck.control.connection import Access, without_first
from potluck.control.identity import Identity
from potluck.control.invite import Invite
from potluck.control.pinned import pinned_context
from potluck.errors import BadInput, DeviceLost


@contextmanager
def listener(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that treats each connection with ``answer``; its port."""
    with socket.create_server((LOCAL, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=5)


def test_an_impostor_gets_not_one_byte(identity: Identity, tmp_path: Path) -> None:
    impostor = Identity.load(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(impostor.certificate, impostor.key)
    received: list[bytes] = []

    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as tls:
            tls.settimeout(2)
            received.append(tls.recv(1000))

    sentence = r"not the coordinator that made this invite.*Nothing was sent"
    with listener(answer) as port, pytest.raises(BadInput, match=sentence):
        join(Invite(LOCAL, port, identity.fingerprint, "secret"))
    assert received == [b""]


def test_a_stolen_certificate_is_worth_nothing_without_its_key(identity: Identity, tmp_path: Path) -> None:
    """After the pin was checked, another server takes the address: its handshake fails, and nothing is sent."""
    with open_door(identity) as door:
        context = pinned_context(door.invite.host, door.invite.port, identity.fingerprint)
    other = Identity.load(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(other.certificate, other.key)

    def answer(connection: socket.socket) -> None:
        with pytest.raises(ssl.SSLError), server.wrap_socket(connection, server_side=True) as tls:
            tls.recv(1)

    with (
        listener(answer) as port,
        socket.create_connection((LOCAL, port)) as connection,
        pytest.raises(ssl.SSLCertVerificationError),
    ):
        context.wrap_socket(connection)


def test_what_speaks_no_tls_is_no_coordinator(identity: Identity) -> None:
    answer = b"SSH-2.0-OpenSSH_9.2\r\n"
    with (
        listener(lambda connection: connection.sendall(answer)) as port,
        pytest.raises(BadInput, match="is no potluck coordinator"),
    ):
        join(Invite(LOCAL, port, identity.fingerprint, "secret"))


@pytest.mark.timing
def test_where_nothing_answers_the_sentence_names_the_place(identity: Identity) -> None:
    with socket.create_server((LOCAL, 0)) as server:
        port = server.getsockname()[1]
    start = time.monotonic()
    with pytest.raises(DeviceLost, match=f"The coordinator at {LOCAL}:{port} does not answer"):
        join(Invite(LOCAL, port, identity.fingerprint, "secret"), patience_s=0.5)
    assert 0.4 < time.monotonic() - start < 2


def test_proxies_of_the_surroundings_are_not_used(identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    with open_door(identity) as door, join(door.invite) as member:
        door.send("cam-1", {"do": "go"})
        assert member.next() == {"do": "go"}


def test_a_coordinator_that_is_back_in_time_was_never_away(identity: Identity) -> None:
    with open_door(identity) as door:
        port = door.invite.port
        member = join(door.invite, patience_s=5.0)
    answers: list[BaseException] = []

    def ask() -> None:
        try:
            member.next()
        except BaseException as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.2)
    with open_door(identity, port=port):
        thread.join(timeout=5)
    # it answers, and knows nobody from the time before
    assert isinstance(answers[0], BadInput)


def test_a_child_process_may_use_the_same_access(identity: Identity) -> None:
    with open_door(identity) as door, join(door.invite) as member:
        generation = door.new_generation()
        with Client(Access.from_json(member.access.to_json())) as child, Client(door.access) as own:
            child.store_set(generation, "a", b"1")
            assert own.store_get(generation, "a") == b"1"
            child.post([{"event": "of the child"}])
            member.post([{"event": "of the parent"}])
            assert {door.arrivals.get(timeout=5)[1]["event"] for _ in range(2)} == {  # type: ignore[index]
                "of the child",
                "of the parent",
            }
            with pytest.raises(BadInput, match="does not know this device"):
                own.next()
        with pytest.raises(BadInput, match="does not know this device"):
            Client(replace(member.access, token="x")).model_files()


def test_large_events_travel_in_parts(identity: Identity) -> None:
    events = [{"event": i, "text": "x" * (3 << 20)} for i in range(4)]
    assert [len(batch) for batch in _batches(events)] == [1, 1, 1, 1]
    with open_door(identity) as door, join(door.invite) as member:
        member.post(events)
        assert [door.arrivals.get(timeout=5)[1] for _ in range(4)] == events


def test_what_is_left_of_ranges() -> None:
    assert without_first([(0, 3), (10, 4)], 0) == [(0, 3), (10, 4)]
    assert without_first([(0, 3), (10, 4)], 2) == [(2, 1), (10, 4)]
    assert without_first([(0, 3), (10, 4)], 5) == [(12, 2)]
    assert without_first([(0, 3), (10, 4)], 7) == []
