"""GGUF files as Hugging Face directories: converted once, in a process of its own, and kept in a cache.

The conversion holds the whole model in float32 several times over; a child process gives that memory back.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from potluck.errors import BadInput, PotluckError, SaveFailed
from potluck.models.shards import LFS_START

_MAGIC = b"GGUF"
_SAMPLES = 64
_SAMPLE_BYTES = 64 << 10
_CONVERSION = "1"  # part of the cache key: raise it when a conversion would give another result


NO_ROOM = 3
"""Exit status of a conversion that the disk had no room for."""


def fingerprint(path: Path) -> str:
    """Key of a GGUF file in the cache: sha256 of its size, its first and last MiB and 64 samples between.

    The whole of a file of many GB is not read each time; two files that differ only between the samples would be
    taken for one. Quantised weights of two trainings differ everywhere.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(f"{_CONVERSION} {size} ".encode())
    with path.open("rb") as handle:
        digest.update(handle.read(1 << 20))
        for i in range(_SAMPLES):
            handle.seek(size * i // _SAMPLES)
            digest.update(handle.read(_SAMPLE_BYTES))
        handle.seek(max(0, size - (1 << 20)))
        digest.update(handle.read())
    return digest.hexdigest()[:32]


def check_gguf(path: Path) -> None:
    """Look at the first bytes.

    Raises:
        BadInput: the file cannot be read, is a Git LFS pointer, or no GGUF file.
    """
    try:
        with path.open("rb") as handle:
            start = handle.read(len(LFS_START))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}.") from None
    if start.startswith(LFS_START):
        raise BadInput(f"{path} is a Git LFS pointer, not the weights: run 'git lfs pull' in its directory.")
    if not start.startswith(_MAGIC):
        raise BadInput(f"{path} is not a GGUF file: it does not begin with 'GGUF'.")


def converted(path: Path, cache: Path, tell: Callable[[str], None] | None = None) -> Path:
    """The Hugging Face directory of a GGUF file, in float32 with its tokenizer and chat template.

    Found in ``cache``, or converted into it: into a sibling that is renamed when it is whole. A second process that
    wants the same file waits for the first. ``tell`` gets one line when a conversion begins.

    Raises:
        BadInput: the file is damaged or of an architecture that transformers cannot convert.
        SaveFailed: the disk is full.
    """
    check_gguf(path)
    target = cache / fingerprint(path)
    if target.is_dir():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{target.name}.lock") as lock:
            if not target.is_dir():
                if tell is not None:
                    tell(f"Converting {path.name} for training, once; it is kept in {target}.")
                _convert_in_child(path, target, lock)
    except OSError as error:
        raise SaveFailed(f"{path.name} could not be converted into {cache}: {error.strerror}.") from None
    return target


def convert(source: Path, target: Path) -> None:
    """Write the model, its tokenizer and its chat template into the empty directory ``target``.

    Raises:
        SaveFailed: the disk has not enough room for the float32 weights.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype="float32",
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    needed = sum(parameter.nbytes for parameter in model.parameters())
    free = shutil.disk_usage(target).free
    if free < needed:
        raise SaveFailed(
            f"{source.name} needs {needed >> 20} MiB in {target.parent}, where {free >> 20} MiB are free: make room."
        )
    model.save_pretrained(target, max_shard_size="1GB")
    tokenizer.save_pretrained(target)
    for file in target.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())


def _convert_in_child(path: Path, target: Path, lock: int) -> None:
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a conversion whose process was killed
    partial.mkdir()
    command = [sys.executable, "-P", "-m", "potluck.models.gguf", str(path.absolute()), str(partial)]
    try:
        # the child holds the lock too: it may outlive this process, and must then not share the directory
        child = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", pass_fds=[lock]
        )
        if child.returncode == 0:
            partial.rename(target)
            return
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if child.returncode < 0:
        perhaps = ", perhaps for want of memory" if child.returncode == -9 else ""
        raise PotluckError(f"The conversion of {path} was ended by signal {-child.returncode}{perhaps}.")
    said = child.stderr.strip().rpartition("\n")[2] or "no reason given"
    raise (SaveFailed if child.returncode == NO_ROOM else BadInput)(said)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _sentence(source: Path, error: Exception) -> str:
    reason = " ".join(str(error).split()) or type(error).__name__
    return f"{source} cannot be converted; it may be cut short or of an unknown architecture ({reason})."


def main(arguments: list[str]) -> int:
    """Convert ``SOURCE`` into the empty directory ``TARGET``; one sentence on stderr if that fails."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    source, target = (Path(argument) for argument in arguments)
    try:
        convert(source, target)
    except PotluckError as error:
        print(error, file=sys.stderr)
        return NO_ROOM if isinstance(error, SaveFailed) else error.exit_code
    except Exception as error:
        full = "os error 28" in str(error) or "No space left" in str(error)
        print(f"The disk of {target.parent} is full." if full else _sentence(source, error), file=sys.stderr)
        return NO_ROOM if full else BadInput.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
