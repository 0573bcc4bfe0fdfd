"""Who is refused, and that strangers harm nobody."""

import json
import os
import socket
import ssl
from dataclasses import replace

import pytest
from doors import join, open_door, raw

from potluck.control.connection import Access
from potluck.control.identity import Identity
from potluck.errors import BadInput, PotluckError


def test_every_refusal_is_a_sentence_and_harms_nobody(identity: Identity, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_door(identity, places=2, taken_names=["hub"]) as door, join(door.invite) as member:
        with pytest.raises(BadInput, match="secret is wrong"):
            join(replace(door.invite, secret="x" * 22), "cam-2")
        for name in ("cam-1", "CAM-1", "hub"):
            with pytest.raises(BadInput, match=f"{name} is in this pool already"):
                join(door.invite, name)
        with pytest.raises(BadInput, match="name"):
            join(door.invite, "cam\n2")
        with monkeypatch.context() as other:
            other.setattr("potluck.control.client.versions", lambda: {"potluck": "0.0.9"})
            with pytest.raises(BadInput, match=r"potluck 0\.0\.9 instead of"):
                join(door.invite, "cam-2")
        with join(door.invite, "cam-2"):
            with pytest.raises(BadInput, match="All 2 places of this pool are taken"):
                join(door.invite, "cam-3")
            for refused in ({"Authorization": "Bearer nobody"}, {}):
                with raw(door, headers=refused) as stranger:
                    answers = [
                        stranger.get("/next"),
                        stranger.post("/events", content=b"{}"),
                        stranger.post("/leave", content=b"{}"),
                        stranger.get("/store/0/a"),
                        stranger.put("/store/0/a", content=b"b"),
                        stranger.get("/model"),
                        stranger.post("/model/ranges", content=b"{}"),
                    ]
                    assert {answer.status_code for answer in answers} == {401}
                    assert all(answer.json()["message"] for answer in answers)
            assert [m.name for m in door.wait_for_members(lambda _: None)] == ["cam-1", "cam-2"]
            door.send("cam-1", {"do": "go"})
            assert member.next() == {"do": "go"}


def test_statuses_of_refusals(identity: Identity) -> None:
    with open_door(identity, invite_s=0.0) as door:
        with raw(door) as stranger:
            body = {"attempt": "a" * 16, "member": {}}
            assert stranger.post("/join", json=body, headers={"Authorization": "Bearer x"}).status_code == 400
            assert stranger.get("/elsewhere").status_code == 404
            assert stranger.get("/join").status_code == 405
            assert "server" not in stranger.get("/join").headers
        with pytest.raises(BadInput, match="invite has expired"):
            join(door.invite)
        with pytest.raises(BadInput, match="secret is wrong"):
            join(replace(door.invite, secret="wrong"))
        with pytest.raises(PotluckError, match="expired when 0 of 1 devices had joined"):
            door.wait_for_members(lambda _: None)


def test_garbage_disturbs_nobody(identity: Identity, capfd: pytest.CaptureFixture[str]) -> None:
    with open_door(identity) as door, join(door.invite) as member:
        where = (door.invite.host, door.invite.port)
        strangers = [socket.create_connection(where) for _ in range(5)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n")
        strangers[1].sendall(os.urandom(1000))
        strangers[2].sendall(b"\x16\x03\x01\x02\x00")
        strangers[3].close()
        context = ssl._create_unverified_context()
        with context.wrap_socket(strangers[4]) as tls:
            tls.sendall(b"\x00garbage\r\n\r\n" + os.urandom(100))
            assert b"400" in tls.recv(1000)
        with raw(door, headers={"Authorization": f"Bearer {member.access.token}"}) as http:
            for body in (b"[" * 100_000, b"{}", b'{"stream": "s", "first": 0, "events": []}', b"\xff", b"1" * 5000):
                assert http.post("/events", content=body).status_code == 400
            gap = {"stream": "s", "first": 3, "events": [{"event": "c"}]}
            assert "Events 1 to 2 are missing" in http.post("/events", json=gap).json()["message"]
            assert http.get("/next?after=x").status_code == 400
            assert http.post("/events", content=bytes((8 << 20) + 1)).status_code == 413
        with raw(door) as http:
            assert http.post("/join", content=bytes(9 << 20), headers={"Authorization": "Bearer x"}).status_code == 413
        door.send("cam-1", {"do": "go"})
        assert member.next() == {"do": "go"}
        for stranger in strangers:
            stranger.close()
    captured = capfd.readouterr()
    assert captured.err == captured.out == ""


def test_secrets_are_not_printed(identity: Identity) -> None:
    with open_door(identity) as door, join(door.invite) as member:
        assert member.access.token not in repr(member.access)
        assert door.access.token not in repr(door.access)
        assert Access.from_json(json.loads(json.dumps(member.access.to_json()))) == member.access
        assert member.access.token != door.access.token
