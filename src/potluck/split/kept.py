"""A contribution as it lies in a client's directory, and single examples of it."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from potluck.errors import BadInput
from potluck.split.agreement import RECORD_PARTS, Manifest, Part, Shard, parse_manifest
from potluck.split.check import Limits, check_shard, supervised_bits
from potluck.split.encoding import decode, decode_rows
from potluck.split.invert import Sent
from potluck.split.one_shot import MANIFEST_FILE
from potluck.split.shard_file import ShardFile, shard_path


@dataclass(frozen=True)
class KeptExample:
    """One example as the server has it."""

    sent: Sent
    positions: tuple[int, ...]
    """Supervised, ascending."""
    targets: tuple[int, ...]
    """For each, a row of the contribution's table, or a token id where targets are ids."""

    def begin(self, positions: int) -> "KeptExample":
        """Its first positions."""
        count = sum(position < positions for position in self.positions)
        return KeptExample(self.sent.begin(positions), self.positions[:count], self.targets[:count])


def read_manifest(directory: Path) -> Manifest:
    """The manifest beside a contribution's shards.

    Raises:
        BadInput: the directory is no contribution, or one of its shards is missing.
    """
    if not directory.is_dir():
        raise BadInput(f"There is no directory {directory}: name the one that 'potluck contribute --keep DIR' made.")
    try:
        manifest = parse_manifest((directory / MANIFEST_FILE).read_bytes())
    except FileNotFoundError:
        raise BadInput(
            f"{directory} has no {MANIFEST_FILE}, so it is no contribution: name a directory that "
            "'potluck contribute --keep DIR' made."
        ) from None
    except OSError as error:
        raise BadInput(f"{directory / MANIFEST_FILE} cannot be read: {error.strerror}.") from None
    except BadInput as error:
        raise BadInput(f"{directory / MANIFEST_FILE}: {error}") from None
    for shard in manifest.shards:
        if not shard_path(directory, shard.sha256).is_file():
            raise BadInput(f"{directory} lacks the shard {shard.sha256[:12]} that its {MANIFEST_FILE} lists.")
    return manifest


def read_examples(directory: Path, manifest: Manifest, limits: Limits, count: int, seed: int) -> list[KeptExample]:
    """``count`` examples drawn uniformly from all, held-out ones too; all, if there are fewer.

    Raises:
        BadInput: a shard is damaged, or is not what the manifest says.
    """
    shards = [shard for shard in manifest.shards if shard.part in RECORD_PARTS]
    numbers = [(i, number) for i, shard in enumerate(shards) for number in range(shard.examples)]
    drawn = sorted(random.Random(seed).sample(numbers, min(count, len(numbers))))
    found: list[KeptExample] = []
    for i, shard in enumerate(shards):
        if chosen := {number for of, number in drawn if of == i}:
            with _checked(directory, shard, limits) as file:
                found += [example for n, example in enumerate(_examples(file, limits)) if n in chosen]
    return found


def longest_example(directory: Path, manifest: Manifest) -> int:
    """Positions of the longest of all examples.

    Raises:
        BadInput: a shard cannot be read.
    """
    longest = 0
    for shard in manifest.shards:
        if shard.part in RECORD_PARTS:
            with ShardFile(shard_path(directory, shard.sha256)) as file:
                longest = max(longest, int(file.read("lengths_B").max()))
    return longest


def read_table(directory: Path, manifest: Manifest, part: Part, limits: Limits) -> Tensor:
    """All rows of the contribution's table (or its negatives), float32 ``(U, D)``.

    Raises:
        BadInput: as :func:`read_examples`.
    """
    found = [torch.empty(0, limits.hidden_size)]
    for shard in manifest.shards:
        if shard.part == part:
            with _checked(directory, shard, limits) as file:
                found.append(decode_rows({name: file.read(name) for name in file.tensors}))
    return torch.cat(found)


def _checked(directory: Path, shard: Shard, limits: Limits) -> ShardFile:
    path = shard_path(directory, shard.sha256)
    info = check_shard(path, limits)
    if (info.part, info.examples, info.tokens, info.rows) != (shard.part, shard.examples, shard.tokens, shard.rows):
        raise BadInput(f"{path} is not what {MANIFEST_FILE} says: it was changed.")
    return ShardFile(path)


def _examples(shard: ShardFile, limits: Limits) -> Iterator[KeptExample]:
    stored = {name: shard.read(name) for name in shard.tensors}
    lengths = stored["lengths_B"].tolist()
    x_RD = decode(stored, limits.hidden_size)
    rows_T = stored.get("rows_T", torch.arange(len(x_RD))).long()
    supervised_T, targets = supervised_bits(shard, sum(lengths)), stored["targets_N"].tolist()
    at = target_at = 0
    for length in lengths:
        positions = np.flatnonzero(supervised_T[at : at + length]).tolist()
        sent = Sent(x_RD[rows_T[at : at + length]], stored.get("outliers_C"))
        yield KeptExample(sent, tuple(positions), tuple(targets[target_at : target_at + len(positions)]))
        at, target_at = at + length, target_at + len(positions)
