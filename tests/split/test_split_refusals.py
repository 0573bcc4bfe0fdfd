"""What a split server and its clients are given and cannot use: a sentence, and the next one succeeds."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from little_store import COMMANDS, WORDS, little_job
from one_shot_world import Served, Told, client_of, give, rows_file, served
from safetensors.torch import load, save
from torch import Tensor

from potluck.control.invite import Invite
from potluck.errors import BadInput, SaveFailed
from potluck.job import Job
from potluck.split.agreement import Manifest, Shard, contribution_id, parse_manifest
from potluck.split.client import fetch
from potluck.split.keys import own_key
from potluck.split.one_shot import MANIFEST_FILE
from potluck.split.settings import store_dir
from potluck.split.store import Store
from potluck.split.trainer import train_store
from potluck.split.uplink import Uplink
from word_model import save_word_model

ROWS = COMMANDS[:16]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Job, Path]]:
    """One server for all that it refuses; what good ann gave is kept in ``kept``."""
    directory = tmp_path_factory.mktemp("refusals")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        job = little_job(directory, {"encoding": "int8", "negatives": 8}, data={"max_length": 8}, epochs=1)
        data = rows_file(directory / "rows.jsonl", ROWS)
        with served(job, directory) as server:
            give(server.invite, directory, "ann", data, model=job.model, holdout="2", keep=directory / "kept")
            yield server, job, directory


@pytest.fixture(scope="module")
def mallory(running: tuple[Served, Job, Path]) -> Iterator[Uplink]:
    server, _, directory = running
    with Uplink.open(Invite.decode(server.invite), "mallory", own_key(directory / "mallory"), patience_s=2.0) as uplink:
        yield uplink


def kept(directory: Path) -> Manifest:
    return parse_manifest((directory / "kept" / MANIFEST_FILE).read_bytes())


def train_shard(directory: Path) -> bytes:
    sha256 = next(shard.sha256 for shard in kept(directory).shards if shard.part == "train")
    return (directory / "kept" / f"{sha256}.safetensors").read_bytes()


def changed(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[bytes], bytes]:
    def with_tensors(content: bytes) -> bytes:
        tensors = load(content)
        change(tensors)
        return save(tensors, metadata={"part": "train"})

    return with_tensors


def put(tensors: dict[str, Tensor], name: str, at: int, value: float) -> None:
    tensors[name].reshape(-1)[at] = value


SPOILT: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "cut short": (lambda content: content[:-10], "cut short|damaged|bytes"),
    "a header only": (lambda content: content[:64], "safetensors|cut short|damaged|header"),
    "nothing": (lambda content: b"", "safetensors|empty|cut short|header"),
    "garbage": (lambda content: b"\xff" * 500, "safetensors|header"),
    "a damaged header": (lambda content: content.replace(b'"I32"', b'"X99"'), "safetensors|header|dtype"),
    "NaN": (changed(lambda t: put(t, "scale_RG", 3, float("nan"))), "scale_RG holds NaN"),
    "infinity": (changed(lambda t: put(t, "outlier_RC", 0, float("inf"))), "outlier_RC holds NaN, infinity"),
    "an index out of range": (changed(lambda t: put(t, "targets_N", 0, 10**6)), "target index 1000000, outside"),
    "an index below zero": (changed(lambda t: put(t, "targets_N", 0, -1)), "target index -1"),
    "a row out of range": (changed(lambda t: put(t, "rows_T", 0, 10**6)), "rows_T points outside"),
    "lengths of nothing": (changed(lambda t: put(t, "lengths_B", 0, 0)), "lengths are not positive"),
    "a length too long": (changed(lambda t: _one_example(t)), "positions; at most 8 are taken"),
    "another width": (changed(lambda t: t.update(q_RD=t["q_RD"][:, :-2].contiguous())), "q_RD is .*, not"),
    "another encoding": (changed(lambda t: t.update(x_RD=t.pop("q_RD").bfloat16())), "lacks|another encoding"),
    "a foreign tensor": (changed(lambda t: t.update(ids=torch.arange(9))), "do not belong there"),
}


def _one_example(tensors: dict[str, Tensor]) -> None:
    """All examples of the shard are one, far too long."""
    total = int(tensors["lengths_B"].sum())
    tensors["lengths_B"] = torch.tensor([total], dtype=torch.int32)


@pytest.mark.parametrize("what", SPOILT)
def test_a_spoilt_shard_is_refused_with_a_reason(
    running: tuple[Served, Job, Path], mallory: Uplink, tmp_path: Path, what: str
) -> None:
    server, job, directory = running
    spoil, said = SPOILT[what]
    path = tmp_path / "shard"
    path.write_bytes(spoil(train_shard(directory)))
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(BadInput, match=said) as refused:
        mallory.send_shard(path, sha256)
    assert len(str(refused.value)) < 300
    assert server.told.said(f"A shard of mallory was refused: {refused.value}")
    assert mallory.missing([sha256]) == [sha256]
    assert list((store_dir(job) / "incoming").iterdir()) == []


def test_other_bytes_than_said_are_refused(running: tuple[Served, Job, Path], mallory: Uplink, tmp_path: Path) -> None:
    _, _, directory = running
    (tmp_path / "shard").write_bytes(train_shard(directory))
    with pytest.raises(BadInput, match=r"has SHA-256 .*: send it again"):
        mallory.send_shard(tmp_path / "shard", "0" * 64)


def with_agreement(manifest: Manifest, **differs: object) -> Manifest:
    return manifest.model_copy(update={"client": "mallory", "agreement": manifest.agreement.model_copy(update=differs)})


def lists(manifest: Manifest, shards: list[Shard]) -> Manifest:
    return manifest.model_copy(update={"client": "mallory", "shards": tuple(shards)})


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"cut": 2}, "cut 1 here, 2 there"),
        ({"encoding": "bf16"}, "encoding int8 here, bf16 there"),
        ({"model": "0" * 64}, "model [0-9a-f]{12} here, 000000000000 there"),
        ({"tokenizer": "0" * 64, "targets": "ids"}, "tokenizer .* there; targets embeddings here, ids there"),
    ],
)
def test_a_contribution_for_something_else_is_told_what_differs(
    running: tuple[Served, Job, Path], mallory: Uplink, differs: dict[str, Any], said: str
) -> None:
    manifest = with_agreement(kept(running[2]), **differs)
    with pytest.raises(BadInput, match=said):
        mallory.commit(contribution_id(manifest), manifest.model_dump(mode="json"))


def test_contributions_that_are_not_whole_are_refused(running: tuple[Served, Job, Path], mallory: Uplink) -> None:
    _, job, directory = running
    manifest = kept(directory)
    shards = [*manifest.shards]
    fields = shards[0].model_dump() | {"sha256": "0" * 64}
    tables = [shard for shard in shards if shard.part == "table"]
    wrong = {
        "another client": manifest,
        "shards of the contribution are missing": lists(manifest, [Shard.model_validate(fields), *shards[1:]]),
        "has no shard of examples": lists(manifest, tables),
        "the contribution's table has 0 rows": lists(manifest, [s for s in shards if s.part != "table"]),
    }
    for said, each in wrong.items():
        with pytest.raises(BadInput, match=said):
            mallory.commit(contribution_id(each), each.model_dump(mode="json"))
    with pytest.raises(BadInput, match="not that of its manifest"):
        mallory.commit("0" * 64, lists(manifest, shards).model_dump(mode="json"))
    with pytest.raises(BadInput, match="no manifest"):
        mallory.commit("0" * 64, {"format": 7})
    assert {m.client for m in Store(store_dir(job)).contributions()} == {"ann"}


def test_after_all_that_a_client_succeeds_and_training_works(running: tuple[Served, Job, Path], tmp_path: Path) -> None:
    server, job, _ = running
    data = rows_file(tmp_path / "rows.jsonl", COMMANDS[20:26])
    assert give(server.invite, tmp_path, "bob", data, model=job.model).examples == 6
    outcome = train_store(job)
    assert outcome is not None
    assert outcome.clients == ("ann", "bob")
    told = Told()
    long = [{"prompt": "please light on please light on please light ->", "completion": " A"}, *ROWS[:3]]
    done = give(server.invite, tmp_path, "cat", rows_file(tmp_path / "l.jsonl", long), model=job.model, listener=told)
    assert (done.examples, done.dropped) == (3, 1)
    assert told.said("3 examples; 1 rows dropped") or told.said("3 examples; 1 row dropped")
    with pytest.raises(BadInput, match="max_length 8 every answer is cut away"):
        give(server.invite, tmp_path, "dan", rows_file(tmp_path / "l.jsonl", long[:1]), model=job.model)


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is empty"), ("{", "jsonl:1"), ('{"a": 1}\n', "jsonl:1")],
)
def test_nothing_to_contribute(running: tuple[Served, Job, Path], tmp_path: Path, content: str, said: str) -> None:
    server, job, _ = running
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(BadInput, match=said):
        give(server.invite, tmp_path, "dan", tmp_path / "rows.jsonl", model=job.model)


def test_another_model_or_tokenizer_is_told_before_anything_is_computed(
    running: tuple[Served, Job, Path], tmp_path: Path
) -> None:
    server, _, _ = running
    data = rows_file(tmp_path / "rows.jsonl", ROWS)
    save_word_model(tmp_path / "other", WORDS, num_hidden_layers=3, initializer_range=0.2)
    save_word_model(tmp_path / "words", [*WORDS[:-2], "F2", "G2"], num_hidden_layers=3)
    for which, differs in (("other", "model"), ("words", "tokenizer")):
        with pytest.raises(BadInput, match=rf"{which} is not the server's model\. .*: {differs} \w+ here, \w+ there\."):
            give(server.invite, tmp_path, "gus", data, model=str(tmp_path / which))
    with pytest.raises(BadInput, match="nowhere"):
        give(server.invite, tmp_path, "gus", data, model=str(tmp_path / "nowhere"))


def test_places_that_cannot_be_written_are_named(running: tuple[Served, Job, Path], tmp_path: Path) -> None:
    server, job, directory = running
    data = rows_file(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    for option in ("keep", "output"):
        with pytest.raises(BadInput, match="full is not empty"):
            give(server.invite, tmp_path, "eve", data, **{option: tmp_path / "full"})
    with pytest.raises(SaveFailed, match="cannot be made"):
        give(server.invite, tmp_path, "eve", data, model=job.model, spool=tmp_path / "full" / "file")
    with pytest.raises(SaveFailed, match="key cannot be kept"):
        give(server.invite, tmp_path / "full" / "file", "eve", data, model=job.model)
    with pytest.raises(BadInput, match="full is not empty"):
        fetch(server.invite, tmp_path / "full", client_of(directory, "ann"))


def test_a_full_disk_is_a_sentence_and_the_rerun_succeeds(
    running: tuple[Served, Job, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, job, _ = running
    data = rows_file(tmp_path / "rows.jsonl", ROWS)

    from potluck.models.durable import move_durably

    def full(temporary: Path, path: Path) -> None:
        if path.is_relative_to(tmp_path):  # the server is in this process too
            raise OSError(28, "No space left on device")
        move_durably(temporary, path)

    with monkeypatch.context() as context:
        context.setattr("potluck.models.durable.move_durably", full)
        with pytest.raises(SaveFailed, match=r"the disk is full\..*make room and try again"):
            give(server.invite, tmp_path, "fay", data, model=job.model)
    assert list((tmp_path / "spool").rglob("*.partial")) == []
    assert give(server.invite, tmp_path, "fay", data, model=job.model).examples == len(ROWS)
