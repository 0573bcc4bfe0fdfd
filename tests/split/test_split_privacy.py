"""What leaves a client where targets are embeddings, and what the server keeps, holds neither text nor token ids."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from little_store import COMMANDS, WORDS, little_job
from one_shot_world import Recording, client_of, give, rows_file, served

from potluck.errors import BadInput
from potluck.job import Job
from potluck.split.client import withdraw
from potluck.split.settings import store_dir
from potluck.texts.encode import encode
from potluck.texts.rows import read_rows
from potluck.texts.tokenizer import load_tokenizer

ROWS = COMMANDS[:20]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def id_sequences(job: Job, data: Path) -> Iterator[tuple[int, ...]]:
    """Each example's ids, the prompt of them, and its targets."""
    for example in encode(read_rows([str(data)], "auto"), load_tokenizer(Path(job.model)), job.data).examples:
        targets = tuple(i for i, supervised in zip(example.ids, example.supervised, strict=True) if supervised)
        yield from (example.ids, example.ids[:-1], example.ids[:4], targets)


def encodings(ids: tuple[int, ...]) -> Iterator[bytes]:
    """As a file or a message might hold them; a byte each is left out, which three small numbers are by chance."""
    for dtype in ("<i4", "<i8", ">i4", ">i8", "<i2", ">i2"):
        yield np.array(ids, dtype).tobytes()
    yield json.dumps(ids).encode()
    yield json.dumps(ids, separators=(",", ":")).encode()


def leaks(content: bytes, job: Job, data: Path) -> list[tuple[int, ...]]:
    return [ids for ids in id_sequences(job, data) if any(each in content for each in encodings(ids))]


def kept(job: Job) -> bytes:
    return b"\n".join(path.read_bytes() for path in sorted(store_dir(job).rglob("*")) if path.is_file())


@pytest.mark.parametrize("encoding", ["fp32", "int8"])
@pytest.mark.parametrize("own_copy", [True, False])
def test_neither_text_nor_ids_leave_a_client(tmp_path: Path, encoding: str, own_copy: bool) -> None:
    job = little_job(tmp_path, {"encoding": encoding})
    data, traffic = rows_file(tmp_path / "rows.jsonl", ROWS), Recording()
    with served(job, tmp_path) as server:
        model = job.model if own_copy else None
        give(server.invite, tmp_path, "ann", data, model=model, traffic=traffic, holdout="3")
    for content in (traffic.everything, kept(job)):
        assert len(content) > 4_000
        assert leaks(content, job, data) == []
        for row in ROWS:
            for text in (row["prompt"], row["completion"], row["prompt"].removesuffix(" ->")):
                assert text.encode() not in content
        for word in set(WORDS) - {"->", "<eos>", *"ABCDEFG", "on", "off", "open", "fan"}:  # those are too short to tell
            assert word.encode() not in content


def test_ids_are_found_where_they_are_sent(tmp_path: Path) -> None:
    """What the other tests look for is there to be found where a client agrees to send it."""
    job = little_job(tmp_path, {"targets": "ids"})
    data, traffic = rows_file(tmp_path / "rows.jsonl", ROWS), Recording()
    with served(job, tmp_path) as server:
        give(server.invite, tmp_path, "ann", data, model=job.model, traffic=traffic, send_ids=True)
    assert leaks(traffic.everything, job, data)
    assert leaks(kept(job), job, data)


def test_indices_into_the_table_are_in_the_order_of_first_use(tmp_path: Path) -> None:
    """Equal roles of other words are equal indices: they say nothing about which words these are."""
    job = little_job(tmp_path)
    swapped = [
        {key: text.replace("on", "off") for key, text in row.items()} for row in ROWS if "off" not in row["prompt"]
    ]
    plain = [row for row in ROWS if "off" not in row["prompt"]]
    sent = []
    with served(job, tmp_path) as server:
        for name, rows in (("ann", plain), ("bob", swapped)):
            data, traffic = rows_file(tmp_path / f"{name}.jsonl", rows), Recording()
            give(server.invite, tmp_path, name, data, model=job.model, traffic=traffic)
            manifest = json.loads(next(r.body for r in traffic.requests if r.path.startswith("/contributions/")))
            sent.append(
                [
                    {key: shard[key] for key in ("part", "examples", "tokens", "targets", "rows")}
                    for shard in manifest["shards"]
                ]
            )
    assert sent[0][:2] == sent[1][:2]


def test_ids_are_not_sent_without_consent(tmp_path: Path) -> None:
    job = little_job(tmp_path, {"targets": "ids"})
    data, traffic = rows_file(tmp_path / "rows.jsonl", ROWS), Recording()
    with served(job, tmp_path) as server, pytest.raises(BadInput, match="--send-ids"):
        give(server.invite, tmp_path, "ann", data, model=job.model, traffic=traffic)
    assert [request.path for request in traffic.requests] == ["/hello"]


def test_a_server_that_asks_for_ids_under_another_name_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Consent is about what is sent: terms that contradict their own agreement are not followed."""
    from potluck.split.backend import StoreBackend

    job = little_job(tmp_path, {"targets": "ids"})
    true_terms = StoreBackend.terms

    def lying(self: StoreBackend, client: str) -> dict[str, object]:
        terms = true_terms(self, client)
        terms["split"] = {**terms["split"], "targets": "embeddings"}
        return terms

    monkeypatch.setattr(StoreBackend, "terms", lying)
    data, traffic = rows_file(tmp_path / "rows.jsonl", ROWS), Recording()
    with served(job, tmp_path) as server, pytest.raises(BadInput, match="targets embeddings here, ids there"):
        give(server.invite, tmp_path, "ann", data, model=job.model, traffic=traffic)
    assert leaks(traffic.everything, job, data) == []


def test_a_key_never_leaves_and_the_data_cannot_be_guessed_by_their_digest(tmp_path: Path) -> None:
    """Two clients of the same data have other digests; the server keeps digests of keys only."""
    job = little_job(tmp_path)
    data = rows_file(tmp_path / "rows.jsonl", ROWS)
    with served(job, tmp_path) as server:
        given = {name: give(server.invite, tmp_path, name, data, model=job.model) for name in ("ann", "bob")}
        manifests = [json.loads(path.read_bytes()) for path in (store_dir(job) / "contributions").iterdir()]
        assert len({manifest["data"] for manifest in manifests}) == 2
        keys = [path.read_bytes() for path in (tmp_path / "clients-home").rglob("client.key")]
        assert len(set(keys)) == 2
        assert not any(key in kept(job) for key in keys)
        # both sent the same shards of activations: what one withdraws, the other still has
        assert withdraw(server.invite, client_of(tmp_path, "ann")) == "ann"
        left = json.loads((store_dir(job) / "contributions" / f"{given['bob'].contribution}.json").read_bytes())
        assert all((store_dir(job) / "shards" / f"{s['sha256']}.safetensors").exists() for s in left["shards"])
