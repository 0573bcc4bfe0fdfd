"""A client of the split server, and what it does when the network or the server breaks."""

import hashlib
import os
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from split_doors import LOCAL, hello, open_split, shard

from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.split.keys import own_key
from potluck.split.traffic import Traffic
from potluck.split.uplink import Uplink


def test_the_model_is_handed_out(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, _), hello(door.invite) as uplink:
        assert [file["name"] for file in uplink.model_files()] == ["config.json", "model.safetensors"]
        assert b"".join(uplink.ranges("model.safetensors", [(254, 4), (1, 2)])) == b"\xfe\xff\x00\x01\x01\x02"
        with pytest.raises(BadInput, match="is no file of this model"):
            list(uplink.ranges("../identity/key.pem", [(0, 1)]))


def test_the_result_is_fetched_when_it_is_there(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        assert uplink.result() is None
        with pytest.raises(BadInput, match="Nothing has been trained yet"):
            list(uplink.fetch_result("adapter.safetensors"))
        (backend.folder / "result" / "adapter.safetensors").write_bytes(content)
        assert uplink.result() == {
            "state": "trained",
            "files": [{"name": "adapter.safetensors", "size": 3 << 20, "sha256": hashlib.sha256(content).hexdigest()}],
        }
        chunks = list(uplink.fetch_result("adapter.safetensors"))
        assert b"".join(chunks) == content
        assert max(map(len, chunks)) <= 1 << 16
        for name in ("../clients.json", "clients.json", ""):
            with pytest.raises(BadInput):
                list(uplink.fetch_result(name))


def broken_after_first_chunk(uplink: Uplink, times: int, meanwhile: Any = lambda: None) -> None:
    class Breaks(httpx.SyncByteStream):
        def __init__(self, whole: Any) -> None:
            self.whole = whole

        def __iter__(self) -> Any:
            yield next(iter(self.whole))
            meanwhile()
            raise httpx.ReadError("the cable was pulled")

        def close(self) -> None:
            self.whole.close()

    send, left = uplink._http.send, iter(range(times))

    def breaking(request: httpx.Request, **options: Any) -> httpx.Response:
        response = send(request, **options)
        if request.url.path.startswith("/result/") and next(left, None) is not None:
            response.stream = Breaks(response.stream)
        return response

    uplink._http.send = breaking  # type: ignore[method-assign]


def test_a_broken_fetch_goes_on_where_it_broke(tmp_path: Path) -> None:
    content = os.urandom(1 << 20)
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        (backend.folder / "result" / "adapter").write_bytes(content)
        broken_after_first_chunk(uplink, 3)
        assert b"".join(uplink.fetch_result("adapter")) == content
        assert uplink.traffic.to_json()["received"]["result"] == 1 << 20


def test_a_result_that_is_replaced_meanwhile_is_not_mixed(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        file = backend.folder / "result" / "adapter"
        file.write_bytes(bytes(1 << 20))
        broken_after_first_chunk(uplink, 1, lambda: file.write_bytes(b"1" * (1 << 20)))
        with pytest.raises(PotluckError, match="replaced adapter while it was fetched"):
            list(uplink.fetch_result("adapter"))


def test_a_server_that_is_started_again_was_never_away(tmp_path: Path) -> None:
    first, second = shard(tmp_path, b"first"), shard(tmp_path, b"second")
    with open_split(tmp_path) as (door, _):
        port = door.invite.port
        uplink = hello(door.invite, patience_s=10.0)
        uplink.send_shard(*first)
    done: list[Any] = []
    thread = threading.Thread(target=lambda: done.append(uplink.send_shard(*second)))
    thread.start()
    time.sleep(0.3)
    with open_split(tmp_path, port=port), uplink:
        thread.join(timeout=8)
        assert done == [None]
        assert uplink.missing([first[1], second[1]]) == []


def test_a_step_survives_the_server(tmp_path: Path) -> None:
    with open_split(tmp_path, slice_s=0.2) as (door, backend):
        port = door.invite.port
        uplink = hello(door.invite, patience_s=10.0)
        backend.answers[1] = Future()
        answers: list[bytes] = []
        thread = threading.Thread(target=lambda: answers.append(uplink.step(1, b"abc")))
        thread.start()
        time.sleep(0.5)
        assert backend.steps == [("cam-1", 1, b"abc")]
    assert answers == []
    with open_split(tmp_path, port=port) as (_, again), uplink:
        thread.join(timeout=8)
        assert answers == [b"cba"]
        assert again.steps == [("cam-1", 1, b"abc")]


def test_a_lost_answer_is_asked_for_again_and_the_step_not_taken_twice(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        send, lost = uplink._http.request, iter([True, True, False])

        def lossy(*arguments: Any, **options: Any) -> httpx.Response:
            response = send(*arguments, **options)
            if next(lost, False):
                raise httpx.ReadError("the answer was lost")
            return response

        uplink._http.request = lossy  # type: ignore[method-assign]
        assert uplink.step(1, b"abc") == b"cba"
        assert backend.steps == [("cam-1", 1, b"abc")]


def test_refusals_are_not_tried_again(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, _), hello(door.invite, patience_s=30.0) as uplink:
        tried, send = [], uplink._http.request

        def counted(*arguments: Any, **options: Any) -> httpx.Response:
            tried.append(arguments)
            return send(*arguments, **options)

        uplink._http.request = counted  # type: ignore[method-assign]
        with pytest.raises(BadInput):
            uplink.send_shard(shard(tmp_path, b"x")[0], "0" * 64)
        assert len(tried) == 1


@pytest.mark.timing
def test_a_server_that_is_gone_is_waited_for_as_long_as_said(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, _):
        uplink = hello(door.invite, patience_s=0.5)
    start = time.monotonic()
    with pytest.raises(DeviceLost, match=f"The server at {LOCAL}:{door.invite.port} does not answer"):
        uplink.alive()
    assert 0.4 < time.monotonic() - start < 2
    with pytest.raises(BadInput, match="cannot be read"):
        uplink.ask("PUT", "/shards/x", tmp_path / "absent")


def test_a_key_that_the_server_does_not_know(tmp_path: Path) -> None:
    with open_split(tmp_path / "a") as (door, _):
        port, uplink = door.invite.port, hello(door.invite)
    (tmp_path / "a" / "store" / "clients.json").unlink()
    with open_split(tmp_path / "a", port=port), uplink, pytest.raises(BadInput, match="does not know this client"):
        uplink.alive()


def test_steps_use_one_connection(tmp_path: Path) -> None:
    with open_split(tmp_path) as (door, _), hello(door.invite) as uplink:
        opened: list[str] = []

        class Watch(httpx.BaseTransport):
            def __init__(self, inner: httpx.BaseTransport) -> None:
                self.inner = inner

            def handle_request(self, request: httpx.Request) -> httpx.Response:
                request.extensions["trace"] = lambda event, _: opened.append(event)
                return self.inner.handle_request(request)

        uplink._http._transport = Watch(uplink._http._transport)
        for number in range(1, 20):
            assert uplink.step(number, b"ab") == b"ba"
        assert not [event for event in opened if event.startswith("connection.connect")]
        assert len([event for event in opened if event == "http11.send_request_headers.complete"]) == 19


def test_traffic_is_counted_by_kind(tmp_path: Path) -> None:
    traffic = Traffic()
    with open_split(tmp_path) as (door, backend), hello(door.invite, traffic=traffic) as uplink:
        (backend.folder / "result" / "adapter").write_bytes(bytes(1000))
        path, sha256 = shard(tmp_path, bytes(100_000))
        uplink.send_shard(path, sha256, {"activations": 90_000, "targets": 9_000})
        uplink.commit("1" * 64, {"shards": [sha256]})
        uplink.step(1, bytes(500), {"activations": 400, "labels": 60}, "gradients")
        list(uplink.fetch_result("adapter"))
        list(uplink.ranges("model.safetensors", [(0, 70_000)]))
        counted = traffic.to_json()
        sent, received = counted["sent"], counted["received"]
        assert sent["activations"] == 90_400
        assert sent["targets"] == 9_000
        assert sent["labels"] == 60
        assert sent["manifest"] == len(f'{{"shards": ["{sha256}"]}}')
        assert sent["other"] > 1040
        assert received["gradients"] == 500
        assert received["result"] == 1000
        assert received["model"] == 70_000
        assert traffic.sent == sum(sent.values())
        assert traffic.received == sum(received.values())


def test_a_key_is_made_once_and_kept_to_its_owner(tmp_path: Path) -> None:
    key = own_key(tmp_path / "data")
    assert own_key(tmp_path / "data") == key != own_key(tmp_path / "other")
    assert (tmp_path / "data" / "client.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "data" / "client.key").write_text("short")
    with pytest.raises(BadInput, match="is damaged"):
        own_key(tmp_path / "data")


def test_a_large_upload_of_a_client_that_is_not_known_hears_why(tmp_path: Path) -> None:
    path, sha256 = shard(tmp_path, bytes(30 << 20))
    with open_split(tmp_path) as (door, backend), hello(door.invite) as uplink:
        backend.known.unlink()
        with pytest.raises(BadInput, match="does not know this client"):
            uplink.send_shard(path, sha256)
        assert list((backend.folder / "shards").iterdir()) == []
