import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from contributed import KEY, OTHER_KEY, agreement, contribute, limits, record, send, some_records, spool

from potluck.errors import BadInput, SaveFailed
from potluck.split.agreement import Manifest, Shard, contribution_id, parse_manifest
from potluck.split.dataset import Dataset
from potluck.split.shard_file import shard_path
from potluck.split.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store(tmp_path / "store")
    with opened.serving():
        yield opened


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spool"


def _names(store: Store, part: str) -> set[str]:
    return {path.stem for path in (store.directory / part).iterdir()}


def _digests(manifest: Manifest) -> set[str]:
    return {shard.sha256 for shard in manifest.shards}


def test_a_contribution_is_there_once_it_is_committed(store: Store, directory: Path) -> None:
    manifest = spool(directory, some_records(40), shard_bytes=16_384)
    store.register("ann", KEY)
    digests = [shard.sha256 for shard in manifest.shards]
    assert store.missing([*digests, digests[0]]) == digests
    for sha256 in digests:
        send(store, directory, sha256, limits())
        assert store.contributions() == []
    assert store.missing(digests) == []
    assert store.commit(manifest, "ann", limits()) == contribution_id(manifest)
    assert store.contributions() == [manifest]
    assert Store(store.directory).contributions() == [manifest]
    assert _names(store, "incoming") == set()


def test_twice_is_as_good_as_once(store: Store, directory: Path) -> None:
    manifest = spool(directory, some_records(10))
    first = contribute(store, directory, manifest, limits())
    for shard in manifest.shards:
        send(store, directory, shard.sha256, limits())
    assert store.commit(manifest, "ann", limits()) == first
    assert store.contributions() == [manifest]


def test_the_same_data_with_other_negatives_replaces_what_was_there(store: Store, directory: Path) -> None:
    contribute(store, directory, spool(directory, some_records(10), negatives=5), limits())
    again = spool(directory, some_records(10), negatives=20)
    contribute(store, directory, again, limits())
    assert store.contributions() == [again]


def test_contributions_come_in_one_order(store: Store, directory: Path) -> None:
    for i, client in enumerate(["carl", "ann", "bob", "ann"]):
        manifest = spool(directory, some_records(4, seed=i), client=client, data=f"{i}" * 64)
        contribute(store, directory, manifest, limits(), key=f"{ord(client[0]):064x}")
    found = store.contributions()
    assert [manifest.client for manifest in found] == ["ann", "ann", "bob", "carl"]
    assert Store(store.directory).contributions() == found


def test_a_name_belongs_to_one_key_and_a_key_to_one_name(store: Store) -> None:
    store.register("ann", KEY)
    store.register("ann", KEY)
    with pytest.raises(BadInput, match="Another client is called Ann here"):
        store.register("Ann", OTHER_KEY)
    with pytest.raises(BadInput, match="This client is called ann here, not Ann"):
        store.register("Ann", KEY)
    with pytest.raises(BadInput, match="This client is called ann here, not bob"):
        store.register("bob", KEY)
    store.register("bob", OTHER_KEY)
    again = Store(store.directory)
    assert (again.client(KEY), again.client(OTHER_KEY), again.client("c" * 64)) == ("ann", "bob", None)
    with pytest.raises(BadInput, match="Another client"):
        again.register("bob", KEY)


def test_a_shard_with_another_digest_leaves_nothing(store: Store, directory: Path) -> None:
    manifest = spool(directory, some_records(5))
    sha256 = manifest.shards[0].sha256
    content = bytearray(shard_path(directory, sha256).read_bytes())
    content[-1] ^= 1
    with store.incoming() as path:
        path.write_bytes(content)
        with pytest.raises(BadInput, match="send it again"):
            store.accept(path, sha256, limits(), "ann")
    assert _names(store, "incoming") == _names(store, "shards") == _names(store, "holders") == set()


def test_a_refused_shard_leaves_the_others(store: Store, directory: Path) -> None:
    good = spool(directory, some_records(5))
    contribute(store, directory, good, limits())
    bad = spool(directory, [record([t % 97 for t in range(80)], [1], [2])])
    with pytest.raises(BadInput, match="80 positions; at most 64"):
        send(store, directory, bad.shards[0].sha256, limits())
    assert store.contributions() == [good]
    assert _names(store, "shards") == _digests(good)


def test_too_large_is_refused_before_it_is_read(store: Store) -> None:
    with store.incoming() as path:
        path.write_bytes(b"")
        os.truncate(path, (32 << 20) + 1)
        with pytest.raises(BadInput, match="at most 33554432 are taken"):
            store.accept(path, "0" * 64, limits(), "ann")


def _changed(manifest: Manifest, i: int, **changes: object) -> Manifest:
    shards = list(manifest.shards)
    shards[i] = Shard(**(shards[i].model_dump() | changes))
    return manifest.model_copy(update={"shards": tuple(shards)})


def test_what_a_manifest_says_is_compared_with_the_shards(store: Store, directory: Path) -> None:
    manifest = spool(directory, some_records(5))
    contribute(store, directory, manifest, limits())
    (store.directory / "contributions" / f"{contribution_id(manifest)}.json").unlink()
    train, table = manifest.shards[0], manifest.shards[1]
    wrong: list[tuple[Manifest, str]] = [
        (_changed(manifest, 0, examples=6), "has 5 as examples, not 6"),
        (_changed(manifest, 0, tokens=train.tokens + 1), "as tokens"),
        (_changed(manifest, 0, targets=1), "as targets"),
        (_changed(manifest, 0, bytes=1), "as bytes"),
        (_changed(manifest, 1, rows=1000), "as rows"),
        (_changed(manifest, 1, part="negatives"), "has table as part"),
        (_changed(manifest, 1, sha256="9" * 64), "1 shards of the contribution are missing, 999999999999"),
        (manifest.model_copy(update={"shards": manifest.shards[1:]}), "no shard of examples"),
        (manifest.model_copy(update={"shards": (train,)}), "table has 0 rows"),
        (manifest.model_copy(update={"client": "bob"}), "is from bob, which is another client"),
        (
            manifest.model_copy(update={"agreement": agreement("bf16", cut=3)}),
            "cut 2 here, 3 there; encoding int8 here, bf16 there",
        ),
    ]
    for changed, told in wrong:
        with pytest.raises(BadInput, match=told):
            store.commit(changed, "ann", limits())
    assert store.contributions() == []
    assert table.part == "table"
    store.commit(manifest, "ann", limits())


def test_an_index_outside_the_table_is_refused(store: Store, directory: Path) -> None:
    manifest = spool(directory, some_records(20))
    few = spool(directory, some_records(1), client="ann")
    contribute(store, directory, few, limits())
    mixed = manifest.model_copy(update={"shards": (manifest.shards[0], few.shards[1]), "data": "8" * 64})
    with pytest.raises(BadInput, match=r"A target has index \d+, but the contribution's table has \d rows"):
        contribute(store, directory, mixed, limits())


def test_a_stranger_commits_nothing(store: Store, directory: Path) -> None:
    manifest = spool(directory, some_records(5))
    for shard in manifest.shards:
        send(store, directory, shard.sha256, limits())
    with pytest.raises(BadInput, match="another client"):
        store.commit(manifest, "bob", limits())


def test_withdrawing_deletes_what_nobody_else_sent(store: Store, directory: Path) -> None:
    both = some_records(6)
    ann = spool(directory, both)
    bob = spool(directory, both, client="bob", held_out=some_records(3, seed=9))
    contribute(store, directory, ann, limits())
    contribute(store, directory, bob, limits(), OTHER_KEY)
    sent_only = spool(directory, some_records(4, seed=5), client="bob").shards[0].sha256
    send(store, directory, sent_only, limits(), "bob")
    assert store.withdraw("bob") == 1
    assert store.contributions() == [ann]
    assert _names(store, "shards") == _digests(ann)
    assert store.withdraw("bob") == 0
    assert store.withdraw("ann") == 1
    assert _names(store, "shards") == set()
    contribute(store, directory, bob, limits(), OTHER_KEY)
    assert store.contributions() == [bob]


def test_a_withdrawal_that_was_broken_off_is_finished(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = spool(directory, some_records(60), shard_bytes=16_384)
    contribute(store, directory, manifest, limits())
    deleted = []

    def unlink(path: Path, missing_ok: bool = False) -> None:
        if len(deleted) == 3:
            raise KeyboardInterrupt
        deleted.append(path)
        os.unlink(path)  # noqa: PTH108

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(KeyboardInterrupt):
            store.withdraw("ann")
    assert _names(store, "shards")
    Store(store.directory).withdraw("ann")
    assert _names(store, "shards") == set()


def test_a_server_that_starts_removes_what_was_half_received_and_keeps_shards(tmp_path: Path, directory: Path) -> None:
    store = Store(tmp_path / "store")
    manifest = spool(directory, some_records(5))
    with store.serving():
        send(store, directory, manifest.shards[0].sha256, limits())
        (store.directory / "incoming" / "half").write_bytes(b"abc")
        Store(store.directory)
        assert _names(store, "incoming") == {"half"}
        with pytest.raises(BadInput, match="Another server uses"), Store(store.directory).serving():
            pass
    with Store(store.directory).serving():
        assert _names(store, "incoming") == set()
    assert _names(store, "shards") == {manifest.shards[0].sha256}


def test_a_full_disk_is_told_and_nothing_is_lost(
    store: Store, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = spool(directory, some_records(5))
    contribute(store, directory, manifest, limits())
    more = spool(directory, some_records(5, seed=1), data="4" * 64)

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("potluck.models.durable.sync", full)
        with pytest.raises(SaveFailed, match="the disk is full"):
            send(store, directory, more.shards[0].sha256, limits())
        with pytest.raises(SaveFailed, match="the disk is full"):
            store.commit(manifest.model_copy(update={"data": "5" * 64}), "ann", limits())
    with pytest.raises(SaveFailed, match="the disk is full"), store.incoming():
        full(directory)
    assert store.contributions() == [manifest]
    assert _names(store, "incoming") == set()
    contribute(store, directory, more, limits())


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be a store of contributions"):
        Store(tmp_path / "file" / "store")


SERVER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from contributed import contribute, limits
from potluck.split.agreement import parse_manifest
from potluck.split.store import Store
root = Path(sys.argv[2])
store = Store(root / "store")
with store.serving():
    for path in sorted(root.glob("*.json")):
        identity = contribute(store, root / "spool", parse_manifest(path.read_bytes()), limits())
        print(identity, flush=True)
"""


def test_nothing_committed_is_lost_when_the_server_is_killed(tmp_path: Path) -> None:
    manifests = {}
    for i in range(30):
        manifest = spool(tmp_path / "spool", some_records(6, seed=i), data=f"{i:064x}", shard_bytes=8192)
        (tmp_path / f"{i:03}.json").write_bytes(manifest.to_json())
        manifests[contribution_id(manifest)] = manifest
    draw, told = random.Random(0), set[str]()
    command = [sys.executable, "-c", SERVER, str(Path(__file__).parent), str(tmp_path)]
    for _ in range(2):
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        told.add(server.stdout.readline().strip())
        time.sleep(draw.uniform(0, 0.15))
        server.send_signal(signal.SIGKILL)
        told |= {line.strip() for line in server.stdout if line.endswith("\n")}
        server.wait()
        store = Store(tmp_path / "store")
        found = {contribution_id(manifest): manifest for manifest in store.contributions()}
        assert told <= found.keys()
        assert all(manifests[identity] == manifest for identity, manifest in found.items())
        with Dataset(store) as dataset:
            assert len(dataset.read(range(len(dataset)))) == 6 * len(found)
        assert len([*dataset.tables()]) == len(found)
    last = subprocess.run(command, capture_output=True, text=True, check=True)
    assert set(last.stdout.split()) == manifests.keys()


def test_a_damaged_manifest_is_named(store: Store, directory: Path) -> None:
    contribute(store, directory, spool(directory, some_records(3)), limits())
    [path] = (store.directory / "contributions").iterdir()
    content = json.loads(path.read_bytes())
    assert parse_manifest(path.read_bytes()).client == content["client"] == "ann"
    path.write_bytes(b"{")
    with pytest.raises(BadInput, match=f"{path.name} is damaged"):
        store.contributions()
