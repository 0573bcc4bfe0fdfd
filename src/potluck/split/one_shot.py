"""One-shot, on a client: activations of all examples into a spool, then an upload that goes on where it was."""

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from potluck.errors import BadInput
from potluck.models.durable import saving, write_durably
from potluck.models.save import replace_directory
from potluck.split.agreement import Manifest, Part, Shard, contribution_id, parse_manifest
from potluck.split.client_data import ClientData
from potluck.split.client_model import ClientModel
from potluck.split.forward import records
from potluck.split.listener import SplitListener
from potluck.split.parts import ClientPart
from potluck.split.records import Record, TargetTable, draw_negatives, write_records, write_rows
from potluck.split.shard_file import shard_path
from potluck.split.terms import Terms
from potluck.split.uplink import Uplink
from potluck.texts.batch import Example

MANIFEST_FILE = "manifest.json"
_KINDS = {"train": "activations", "held-out": "held-out activations", "table": "table", "negatives": "negatives"}


def contribute_once(
    uplink: Uplink,
    terms: Terms,
    model: ClientModel,
    examples: ClientData,
    name: str,
    spool: Path,
    keep: Path | None,
    listener: SplitListener,
) -> str:
    """Compute, unless that was done before, upload what the server lacks, and commit; the contribution's id.

    Args:
        uplink: to the server.
        terms: the server's.
        model: this client's side of it.
        examples: what is contributed.
        name: of the client.
        spool: where shards lie until they are committed.
        keep: a directory that gets a copy of them.
        listener: told how it goes.

    Raises:
        BadInput: the server refuses.
        DeviceLost: it does not answer.
        SaveFailed: the disk is full.
    """
    directory = spool / hashlib.sha256(f"{terms.agreement.model_dump_json()} {examples.digest}".encode()).hexdigest()
    manifest = _spooled(directory)
    if manifest is None:
        manifest = _computed(terms, model, examples, name, directory, listener)
    else:
        listener.tell("Its activations were computed before: going on with the upload.")
    identity = contribution_id(manifest)
    missing = set(uplink.missing([shard.sha256 for shard in manifest.shards]))
    total, done = sum(shard.bytes for shard in manifest.shards), 0
    for shard in manifest.shards:
        if shard.sha256 in missing:
            uplink.send_shard(shard_path(directory, shard.sha256), shard.sha256, _kinds(shard))
        done += shard.bytes
        listener.progress("Uploading, KiB", done >> 10, total >> 10)
    uplink.commit(identity, manifest.model_dump(mode="json"))
    if keep is not None:
        with replace_directory(keep, overwrite=False) as copy:
            for file in directory.iterdir():
                shutil.copyfile(file, copy / file.name)
    shutil.rmtree(directory, ignore_errors=True)
    return identity


def _computed(
    terms: Terms, model: ClientModel, examples: ClientData, name: str, directory: Path, listener: SplitListener
) -> Manifest:
    """All shards and then the manifest, in the spool."""
    split = terms.split
    with saving(directory):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    table = TargetTable() if split.targets == "embeddings" else None
    shards: list[Shard] = []
    parts: dict[Part, tuple[Example, ...]] = {"train": examples.train, "held-out": examples.held_out}
    total, done = sum(len(e.ids) for some in parts.values() for e in some), 0

    def counted(part: ClientPart, some: Sequence[Example]) -> Iterator[Record]:
        nonlocal done
        for record in records(part, some):
            done += len(record.prefix) + 1
            listener.progress("Computing, tokens", done, total)
            yield record

    with model.part(terms, listener, trainable=False) as part:
        for which, some in parts.items():
            shards += write_records(counted(part, some), directory, part=which, encoding=split.encoding, table=table)
        if table is not None:
            drawn = draw_negatives(terms.vocab_size, terms.negatives, examples.seed)
            shards += write_rows(table.ids, part.target_rows, directory, part="table", encoding=split.encoding)
            shards += write_rows(drawn, part.target_rows, directory, part="negatives", encoding=split.encoding)
    manifest = Manifest(client=name, agreement=terms.agreement, data=examples.digest, shards=tuple(shards))
    write_durably(directory / MANIFEST_FILE, manifest.to_json(), directory)
    return manifest


def _spooled(directory: Path) -> Manifest | None:
    """The manifest of a contribution that was computed before, and whose files are all there and whole."""
    try:
        manifest = parse_manifest((directory / MANIFEST_FILE).read_bytes())
        whole = all(_digest(shard_path(directory, shard.sha256)) == shard.sha256 for shard in manifest.shards)
    except (OSError, BadInput):
        return None
    return manifest if whole else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _kinds(shard: Shard) -> Mapping[str, int]:
    """What a shard's bytes are: its targets' indices and bits apart from the activations."""
    if shard.part in ("table", "negatives"):
        return {_KINDS[shard.part]: shard.bytes}
    targets = 4 * shard.targets + -(-shard.tokens // 8)
    return {_KINDS[shard.part]: shard.bytes - targets, "targets": targets}
