"""Results on disk, whole or not at all: directories replaced by renaming, checkpoints written shard by shard."""

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from potluck.errors import BadInput, PotluckError, SaveFailed
from potluck.models.durable import DISK_FAULTS, FULL, sync
from potluck.models.shards import BESIDE_WEIGHTS, INDEX_FILE, SINGLE_FILE


def check_output(target: Path, overwrite: bool) -> None:
    """See, before anything is computed, whether a result may be put at ``target``.

    Raises:
        BadInput: it is a file, is not empty (without ``overwrite``), cannot be written, or is, or holds, the root,
            home or current directory.
    """
    resolved = target.resolve()
    for protected in (Path.home(), Path.cwd()):
        if protected.resolve().is_relative_to(resolved):
            raise BadInput(f"{target} is or holds {protected}: a result needs a directory of its own.")
    if resolved.exists() and not resolved.is_dir():
        raise BadInput(f"{target} is a file: name a directory for the result.")
    if resolved.is_dir() and any(resolved.iterdir()) and not overwrite:
        raise BadInput(f"{target} is not empty: name another directory, or replace it with --overwrite.")
    if resolved.is_mount():
        raise BadInput(f"{target} is a mount point, which cannot be replaced: name a directory in it.")
    parent = next(ancestor for ancestor in resolved.parents if ancestor.exists())
    if not parent.is_dir():
        raise BadInput(f"{target} cannot be made: {parent} is a file.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise BadInput(f"{target} cannot be made: {parent} is not writable.")


@contextmanager
def replace_directory(target: Path, overwrite: bool) -> Iterator[Path]:
    """A new directory to write into, beside ``target`` on the same disk; it takes its place when the block ends.

    Everything is on the disk before the names change. If the block fails, the new directory is removed and what stood
    at ``target`` is untouched. With ``overwrite``, the old directory is renamed away, put back if the new one cannot
    take its place, and removed last.

    Raises:
        BadInput: as :func:`check_output`.
        SaveFailed: the disk is full or failed.
    """
    check_output(target, overwrite)
    resolved = target.resolve()
    partial = resolved.with_name(f".{resolved.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise SaveFailed(f"{target} cannot be made: {error.strerror}.") from error
    try:
        yield partial
        _sync(partial)
        _swap(partial, resolved, overwrite)
    except BaseException as error:
        written = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file()) >> 20
        shutil.rmtree(partial, ignore_errors=True)
        number = _disk_fault(error)
        if number is None:
            raise
        raise SaveFailed(_failure(target, number, written)) from error


def storable(tensor: Tensor) -> Tensor:
    """The same values on the CPU, contiguous and alone in their storage, as safetensors wants them."""
    whole = tensor.detach().cpu().contiguous()
    return whole if whole.untyped_storage().nbytes() == whole.nbytes else whole.clone()


_LICENCES = ["LICENSE*", "NOTICE*"]


class CheckpointWriter:
    """A checkpoint in Hugging Face layout, written as its tensors come, never held as a whole.

    At most ``max_shard_bytes`` wait in memory (or one tensor, where that is larger).
    """

    def __init__(self, directory: Path, max_shard_bytes: int = 1 << 30) -> None:
        self._directory = directory
        self._max_shard_bytes = max_shard_bytes
        self._waiting: dict[str, Tensor] = {}
        self._waiting_bytes = 0
        self._shard_names: list[list[str]] = []
        self._seen: set[str] = set()
        self._total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Take one whole tensor, in the dtype it is to have on disk; it must not change before ``finish``.

        Raises:
            ValueError: the name came before.
            OSError, SafetensorError: a shard could not be written (see :func:`replace_directory`).
        """
        if name in self._seen:
            raise ValueError(f"{name} was added twice")
        self._seen.add(name)
        whole = storable(tensor)
        if self._waiting and self._waiting_bytes + whole.nbytes > self._max_shard_bytes:
            self._flush()
        self._waiting[name] = whole
        self._waiting_bytes += whole.nbytes
        self._total_bytes += whole.nbytes

    def finish(self) -> None:
        """Write what waits, give the shards their final names, and write the index where there are several.

        Raises:
            OSError, SafetensorError: as ``add``.
        """
        self._flush()
        count = len(self._shard_names)
        if count == 1:
            self._temporary(0).rename(self._directory / SINGLE_FILE)
            return
        weight_map: dict[str, str] = {}
        for i, names in enumerate(self._shard_names):
            file = f"model-{i + 1:05}-of-{count:05}.safetensors"
            self._temporary(i).rename(self._directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _flush(self) -> None:
        save_file(self._waiting, self._temporary(len(self._shard_names)), metadata={"format": "pt"})
        self._shard_names.append([*self._waiting])
        self._waiting, self._waiting_bytes = {}, 0

    def _temporary(self, shard: int) -> Path:
        return self._directory / f"shard-{shard + 1:05}.safetensors"


def _sync(directory: Path) -> None:
    readable = directory.stat().st_mode & 0o666
    for path in [directory, *directory.rglob("*")]:
        if path.suffix == ".safetensors":
            path.chmod(readable)  # the library makes them for their owner alone, whatever the umask says
        sync(path)


def _swap(partial: Path, target: Path, overwrite: bool) -> None:
    try:
        old = target.rename(partial.with_suffix(".old")) if overwrite and target.exists() else None
        try:
            partial.rename(target)
        except BaseException:
            if old is not None:
                old.rename(target)
            raise
        sync(target.parent)
    except OSError as error:
        raise SaveFailed(f"{target} could not take its place: {error.strerror}.") from error
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _disk_fault(error: BaseException) -> int | None:
    """The number of the operating system's error, where writing failed for the disk's sake."""
    if isinstance(error, OSError):
        return error.errno if error.errno in DISK_FAULTS else None
    if isinstance(error, SafetensorError) or type(error) is PotluckError:
        # safetensors, and a device that wrote in a process of its own, tell the number only in their text
        told = re.search(r"\(os error (\d+)\)|OSError: \[Errno (\d+)\]", str(error))
        number = int(told[1] or told[2]) if told else None
        return number if number in DISK_FAULTS else None
    return None


def _failure(target: Path, number: int, written_mib: int) -> str:
    parent = next(ancestor for ancestor in target.resolve().parents if ancestor.exists())
    free_mib = shutil.disk_usage(parent).free >> 20
    reason = "the disk is full" if number in FULL else os.strerror(number)
    return (
        f"{target} could not be saved: {reason} ({parent} has {free_mib} MiB free; {written_mib} MiB were written and "
        "removed again). What stood there before is untouched; make room or name another directory."
    )


def copy_beside_weights(base_dir: Path, directory: Path) -> None:
    """Copy what a checkpoint has beside its weights: config, tokenizer, template, licence."""
    for pattern in (*BESIDE_WEIGHTS, *_LICENCES):
        for file in base_dir.glob(pattern):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
