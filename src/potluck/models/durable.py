"""Files that are there whole or not at all, whenever the machine stops."""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from potluck.errors import SaveFailed

FULL = {errno.ENOSPC, errno.EDQUOT}
DISK_FAULTS = {*FULL, errno.EFBIG, errno.EIO, errno.EROFS}


@contextmanager
def saving(directory: Path) -> Iterator[None]:
    """Turn the faults of the disk under ``directory`` into a sentence.

    Raises:
        SaveFailed: the disk is full or failed.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_FAULTS:
            raise
        reason = "the disk is full" if error.errno in FULL else os.strerror(error.errno or 0)
        raise SaveFailed(
            f"{directory} cannot take more: {reason}. What was there before is whole; make room and try again."
        ) from error


def write_durably(path: Path, content: bytes, temporary_in: Path) -> None:
    """Put a file at ``path``, replacing what stood there; ``temporary_in`` is a directory on the same disk.

    Raises:
        SaveFailed: the disk is full or failed; what stood there before is untouched.
    """
    temporary = temporary_in / f".{secrets.token_hex(8)}.partial"
    with saving(path.parent):
        try:
            with temporary.open("wb") as handle:
                handle.write(content)
            move_durably(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def move_durably(temporary: Path, path: Path) -> None:
    """Give a written file its name: it is on the disk before, and its name is when this returns."""
    sync(temporary)
    temporary.rename(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """See a file's content, or a directory's names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path, mode: int = 0o600) -> Iterator[None]:
    """Keep out other processes that lock the same file, which is made with ``mode`` if it is not there."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
