"""Front doors and members for tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from potluck.control.client import Client
from potluck.control.front_door import FrontDoor
from potluck.control.identity import Identity
from potluck.control.invite import Invite

LOCAL = "127.0.0.1"


def join(invite: Invite, name: str = "cam-1", **options: Any) -> Client:
    told = {"address": LOCAL, "has_data": False, "threads": 1, "machine": {"cores": 2}, "patience_s": 1.0}
    return Client.join(invite, name, **{**told, **options})


@contextmanager
def open_door(identity: Identity, places: int = 1, **options: Any) -> Iterator[FrontDoor]:
    told = {"invite_s": 60, "grace_s": 0.2, **options}
    with FrontDoor(identity, told.pop("address", LOCAL), places=places, **told) as door:
        yield door


def all_bytes(directory: Path, name: str, runs: list[tuple[int, int]]) -> bytes:
    content = (directory / name).read_bytes()
    return b"".join(content[offset : offset + length] for offset, length in runs)


def raw(door: FrontDoor, **options: Any) -> httpx.Client:
    """A client of a stranger, who trusts anybody."""
    return httpx.Client(base_url=door.access.url, verify=False, trust_env=False, **options)
