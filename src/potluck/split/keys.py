"""A client's key: by it the server knows the client again, and keeps only its digest."""

import hashlib
import re
import secrets
from pathlib import Path

from potluck.control.identity import user_data, write_private
from potluck.errors import BadInput, SaveFailed
from potluck.models.durable import locked


def own_key(directory: Path | None = None) -> str:
    """This machine's key, kept in ``directory`` (the user's data directory if left out) and made there the first time.

    Raises:
        BadInput: what lies there is damaged.
        SaveFailed: it could not be written.
    """
    directory = directory or user_data()
    path = directory / "client.key"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(directory / "lock"):
            if not path.is_file():
                write_private(path, secrets.token_urlsafe(32).encode())
            key = path.read_bytes()
    except OSError as error:
        raise SaveFailed(f"This client's key cannot be kept in {directory}: {error.strerror}.") from None
    if not re.fullmatch(rb"[\w-]{43}", key):
        raise BadInput(f"{path} is damaged: delete it, and contribute under another name with --name.")
    return key.decode()


def key_digest(key: str) -> str:
    """What a server keeps of a key: its SHA-256 in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()
