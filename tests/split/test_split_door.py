"""Who is let in by the split server, what it takes, and that nobody harms it; over real TLS."""

import hashlib
import json
import os
import socket
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
from split_doors import SECRET, hello, open_split, shard, stranger

from potluck.control.versions import versions
from potluck.errors import BadInput, PotluckError, SaveFailed
from potluck.split.keys import key_digest

KEY = "k" * 43
ZEROS = "0" * 64


def test_strangers_are_told_nothing_else(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend):
        for token in (None, "x", SECRET, "ü"):
            with stranger(door) as http:
                headers = {} if token is None else {"Authorization": b"Bearer " + token.encode()}
                asked = [
                    *(("GET", path) for path in ("/", "/model", "/result", "/result/a", "/step?number=1", "/hello")),
                    *(("POST", path) for path in ("/model/ranges", "/shards/missing", "/step?number=1", "/alive")),
                    *(("PUT", path) for path in (f"/shards/{ZEROS}", f"/contributions/{ZEROS}")),
                    ("DELETE", "/contributions"),
                    *([] if token == SECRET else [("POST", "/hello")]),
                ]
                answers = [http.request(*each, headers=headers, content=b"{}") for each in asked]
            assert {answer.status_code for answer in answers} == {401}
            assert {answer.headers["content-type"] for answer in answers} == {"application/json"}
            assert all(answer.json()["message"] for answer in answers)
        assert backend.clients() == {}
        assert backend.steps == []
        with pytest.raises(BadInput, match="another server"):
            hello(replace(door.invite, secret="wrong"))


def test_the_server_knows_the_digest_of_a_key_only(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        assert uplink.terms == {"you": "cam-1", "cut": 2}
        assert backend.clients() == {"cam-1": key_digest(KEY)}
        uplink.alive()
        assert backend.heard == ["cam-1"]
    kept = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert KEY.encode() not in kept
    assert SECRET.encode() not in kept


def test_two_clients_of_one_name(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, _), hello(door.invite), hello(door.invite):
        with pytest.raises(BadInput, match="Another client is called cam-1"):
            hello(door.invite, key="o" * 43)
        with pytest.raises(BadInput, match="name"):
            hello(door.invite, name="cam\n1")


def test_other_versions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.split.uplink.versions", lambda: {**versions(), "torch": "0.1"})
    with open_split(tmp_path) as (door, backend), pytest.raises(BadInput, match=r"torch 0\.1 instead of"):
        hello(door.invite)
    assert backend.clients() == {}


def test_what_is_too_large_is_refused_with_the_limit(tmp_path: Path) -> None:
    large, slack = 33 << 20, bytes((32 << 20) + 1024)
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        path, sha256 = shard(tmp_path, bytes(large))
        with pytest.raises(BadInput, match=r"A shard may have 32 MiB\."):
            uplink.send_shard(path, sha256)
        uplink.send_shard(*shard(tmp_path, slack))
        with pytest.raises(BadInput, match=r"A request may have 8 MiB\."):
            uplink.commit(ZEROS, {"x": "x" * (8 << 20)})
        with pytest.raises(BadInput, match=r"A step's message may have 64 MiB\."):
            uplink.step(1, bytes((64 << 20) + 1))
        assert backend.steps == []
        assert [path.name for path in (backend.folder / "shards").iterdir()] == [hashlib.sha256(slack).hexdigest()]
        assert list((backend.folder / "incoming").iterdir()) == []


def test_uploads_do_not_fill_the_memory(tmp_path: Path) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(31 << 4):
            yield os.urandom(1 << 16)

    with open_split(tmp_path) as (door, _), hello(door.invite), stranger(door, KEY) as http:
        for _ in range(2):
            assert http.put(f"/shards/{ZEROS}", content=endless()).status_code == 422
        before = psutil.Process().memory_info().rss
        for _ in range(4):
            assert http.put(f"/shards/{ZEROS}", content=endless()).status_code == 422
        assert psutil.Process().memory_info().rss - before < 16 << 20


def test_an_upload_cut_short_leaves_nothing(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        context = ssl._create_unverified_context()
        head = (
            f"PUT /shards/{ZEROS} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9000000\r\n\r\n"
        )
        with (
            socket.create_connection((door.invite.host, door.invite.port)) as connection,
            context.wrap_socket(connection) as tls,
        ):
            tls.sendall(head.encode() + bytes(3 << 20))
            deadline = time.monotonic() + 5
            while not list((backend.folder / "incoming").iterdir()):
                assert time.monotonic() < deadline
        while list((backend.folder / "incoming").iterdir()):
            assert time.monotonic() < deadline
        assert list((backend.folder / "shards").iterdir()) == []
        path, sha256 = shard(tmp_path, b"whole")
        uplink.send_shard(path, sha256)
        assert uplink.missing([sha256, ZEROS]) == [ZEROS]


def test_a_refused_shard_is_a_sentence_and_the_server_goes_on(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        path, sha256 = shard(tmp_path, b"good")
        with pytest.raises(BadInput, match="not those of its name"):
            uplink.send_shard(path, ZEROS)
        with pytest.raises(BadInput, match="1 shards are missing"):
            uplink.commit("1" * 64, {"shards": [sha256]})
        uplink.send_shard(path, sha256)
        uplink.commit("1" * 64, {"shards": [sha256], "format": 1})
        assert json.loads((backend.folder / f"cam-1.{'1' * 64}").read_text()) == {"shards": [sha256], "format": 1}
        with pytest.raises(BadInput, match="SHA-256"):
            uplink.commit("x" * 64, {})
        uplink.withdraw()
        assert list(backend.folder.glob("cam-1.*")) == []


def test_a_full_disk_is_no_fault_of_the_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise SaveFailed("The disk of the server is full.")

    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        monkeypatch.setattr(backend, "accept", full)
        with pytest.raises(PotluckError, match=r"server.s disk is full") as caught:
            uplink.send_shard(*shard(tmp_path, b"x"))
        assert not isinstance(caught.value, BadInput)


def test_a_step_is_taken_once_whoever_asks_again(tmp_path: Path) -> None:
    with open_split(tmp_path, slice_s=0.1) as (door, backend), hello(door.invite) as uplink:
        with stranger(door, KEY) as http:
            backend.answers[7] = Future()
            assert http.post("/step?number=7", content=b"abc").status_code == 204
            assert http.post("/step?number=7", content=b"abc").status_code == 204
            assert http.post("/step?number=8", content=b"def").json()["message"].endswith("not answered yet.")
            backend.answers[7].set_result(b"answer")
            for method in ("POST", "GET"):
                assert http.request(method, "/step?number=7", content=b"abc").content == b"answer"
            assert http.post("/step?number=7", content=b"other").status_code == 409
            assert http.post("/step?number=6", content=b"abc").status_code == 409
            assert http.get("/step?number=9").status_code == 404
            assert http.get("/step?number=x").status_code == 400
        assert backend.steps == [("cam-1", 7, b"abc")]
        assert uplink.step(8, b"123") == b"321"
        assert uplink.step(9, b"") == b""


def test_a_step_that_fails_says_why(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        backend.answers[1] = Future()
        backend.answers[1].set_exception(BadInput("The gradient is not finite."))
        for _ in range(2):
            with pytest.raises(BadInput, match="gradient is not finite"):
                uplink.step(1, b"x")
        backend.answers[2] = Future()
        backend.answers[2].set_exception(ValueError("a secret detail"))
        with pytest.raises(PotluckError, match=r"The server failed \(ValueError\)"):
            uplink.step(2, b"x")
        assert uplink.step(3, b"ab") == b"ba"
        assert len(backend.steps) == 3


def test_garbage_disturbs_nobody(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(1000), b"\x16\x03\x01\x02\x00", b""):
            with socket.create_connection((door.invite.host, door.invite.port)) as connection:
                connection.sendall(garbage)
        with stranger(door, KEY) as http:
            for body in (b"[" * 100_000, b"{}", b'{"shas": ["x"]}', b"\xff", b'{"shas": [], "more": 1}'):
                assert http.post("/shards/missing", content=body).status_code == 400
            for body in (b"", b"[]", os.urandom(100), b"null"):
                assert http.put(f"/contributions/{ZEROS}", content=body).status_code == 400
            assert http.put("/shards/..%2F..%2Fx", content=b"").status_code in (400, 404)
            assert http.get("/nowhere").json()["message"] == "A potluck server has nothing here."
        with stranger(door, SECRET) as http:
            for body in (b"{}", os.urandom(100), b'{"name": 1}'):
                assert http.post("/hello", content=body).status_code == 400
        assert uplink.step(1, b"ab") == b"ba"
        assert backend.clients() == {"cam-1": key_digest(KEY)}
    captured = capfd.readouterr()
    assert captured.err == captured.out == ""


@pytest.mark.timing
def test_the_end_does_not_wait_for_a_step(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite), stranger(door, KEY) as http:
        backend.answers[1] = Future()
        with pytest.raises(httpx.ReadTimeout):
            http.post("/step?number=1", content=b"x", timeout=0.3)
        start = time.monotonic()
    assert time.monotonic() - start < 2
    backend.answers[1].set_result(b"the trainer's thread goes on")
