"""Files handed out by ranges, over the front door."""

import hashlib
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from doors import all_bytes, join, open_door
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from potluck.chain.ranges import Ranges
from potluck.control.files import ModelFiles
from potluck.control.identity import Identity
from potluck.errors import BadInput
from potluck.models.checkpoint import Checkpoint
from potluck.models.fetched import Fetched

SIZE = 3 << 20
RUNS = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 99)), max_size=20)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    (path / "model.safetensors").write_bytes(os.urandom(SIZE))
    (path / "consolidated.safetensors").write_bytes(b"the same weights again, in another layout")
    for name in ("config.json", "tokenizer.json", "chat_template.jinja", "secret.txt", "pytorch_model.bin"):
        (path / name).write_text(name * 200)
    return path


def test_the_listing_has_the_model_and_nothing_else(directory: Path, tmp_path: Path) -> None:
    files = ModelFiles(directory, tmp_path)
    assert [file.name for file in files.listing()] == [
        "chat_template.jinja",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    for name, size, sha256 in files.listing():
        content = (directory / name).read_bytes()
        assert (size, sha256) == (len(content), hashlib.sha256(content).hexdigest())


def test_digests_are_kept_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").touch()
    first = ModelFiles(model, cache).listing()
    with monkeypatch.context() as without:
        without.setattr(hashlib, "file_digest", None)
        assert ModelFiles(model, cache).listing() == first
    (model / "config.json").write_text("[]")
    os.utime(model / "config.json", ns=(1, 1))
    assert ModelFiles(model, cache).listing() != first


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(runs=RUNS)
def test_ranges_are_the_bytes_of_the_file(directory: Path, runs: list[tuple[int, int]]) -> None:
    files = ModelFiles(directory)
    assert files.check("config.json", runs) == sum(length for _, length in runs)
    assert b"".join(files.read("config.json", runs)) == all_bytes(directory, "config.json", runs)


def test_over_the_front_door(identity: Identity, directory: Path) -> None:
    with open_door(identity, files=ModelFiles(directory)) as door, join(door.invite) as member:
        listing = {file["name"]: file for file in member.model_files()}
        assert listing["model.safetensors"]["size"] == SIZE
        runs = [(5, 10), (0, SIZE), (SIZE - 1, 1), (7, 0), *((3 * i, 2) for i in range(30_000))]
        chunks = list(member.ranges("model.safetensors", runs))
        assert b"".join(chunks) == all_bytes(directory, "model.safetensors", runs)
        assert max(map(len, chunks)) <= 1 << 20
        for name in ("secret.txt", "../model.safetensors", "/etc/passwd", ""):
            with pytest.raises(BadInput, match="is no file of this model"):
                list(member.ranges(name, [(0, 1)]))
        for run in ((SIZE, 1), (-1, 2), (0, -1)):
            with pytest.raises(BadInput, match=r"lie outside model\.safetensors"):
                list(member.ranges("model.safetensors", [run]))
        assert b"".join(member.ranges("config.json", [(0, 4)])) == b"conf"


def test_a_member_reads_its_share_of_a_checkpoint(identity: Identity, tmp_path: Path) -> None:
    model, rows, columns = tmp_path / "model", Ranges(((3, 9),)), Ranges(((0, 7), (30, 40)))
    model.mkdir()
    stored = {"wide": torch.randn(64, 40), "norm": torch.randn(40)}
    save_file(stored, model / "model.safetensors")
    (model / "config.json").write_text("{}")
    with open_door(identity, files=ModelFiles(model)) as door, join(door.invite) as member:
        for _ in range(2):
            fetched = Fetched(tmp_path / "cache", member.model_files(), member.ranges)
            fetched.fetch_small()
            with Checkpoint.open(fetched.directory, fetched.need) as checkpoint:
                assert torch.equal(checkpoint.read("wide", rows=rows), stored["wide"][3:9])
                assert torch.equal(checkpoint.read("wide", columns=columns), stored["wide"][:, [*columns]])
                assert torch.equal(checkpoint.read("norm"), stored["norm"])
        assert fetched.bytes_fetched == 0


def test_a_broken_stream_goes_on_where_it_broke(identity: Identity, directory: Path) -> None:
    class Breaks(httpx.SyncByteStream):
        def __init__(self, whole: Any) -> None:
            self.whole = whole

        def __iter__(self) -> Any:
            yield next(iter(self.whole))
            raise httpx.ReadError("the cable was pulled")

        def close(self) -> None:
            self.whole.close()

    with open_door(identity, files=ModelFiles(directory)) as door, join(door.invite) as member:
        stream, breaking = member._http.send, iter([True, True, False])

        def send(request: httpx.Request, **options: Any) -> httpx.Response:
            response = stream(request, **options)
            if next(breaking, False):
                response.stream = Breaks(response.stream)
            return response

        member._http.send = send  # type: ignore[method-assign]
        runs = [(100, 1 << 20), (10, SIZE - 10)]
        assert b"".join(member.ranges("model.safetensors", runs)) == all_bytes(directory, "model.safetensors", runs)


def test_a_changed_file_is_refused(identity: Identity, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    with open_door(identity, files=ModelFiles(tmp_path)) as door, join(door.invite) as member:
        assert b"".join(member.ranges("config.json", [(0, 2)])) == b"{}"
        (tmp_path / "config.json").write_text("{ }")
        with pytest.raises(BadInput, match="was changed during the training"):
            list(member.ranges("config.json", [(0, 2)]))


def test_without_files_none_are_handed_out(identity: Identity) -> None:
    with (
        open_door(identity) as door,
        join(door.invite) as member,
        pytest.raises(BadInput, match="hands out no model"),
    ):
        member.model_files()
