"""What the processes of ``bench pool`` tell each other, as JSON lines.

One *host* process a device has everything imported and computes nothing; it forks a *rank* for each strategy, which
waits on a pipe between its steps.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Event = dict[str, Any]


class RankSpec(BaseModel):
    """What a rank is begun with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: Literal["measure", "train"]
    device: str
    """Name of the device."""
    rank: int
    world_size: int
    address: str
    """Of the device on the testbed's network."""
    store: str
    """A file through which the ranks of one strategy find each other."""
    pace: float | None
    """The device's speed; None for as fast as a core is."""
    job: dict[str, Any]
    work: dict[str, Any]
    """The half-batch that is measured; its config is that of the model."""
    cache: str = ""
    """``measure``: a directory for what is measured."""
    plan: dict[str, Any] = {}
    """``train``: who holds what."""


class Lines:
    """Lines out of what arrives in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[Any]:
        """The JSON values of the lines that are whole now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def encoded(value: Any) -> bytes:
    """One line."""
    return json.dumps(value).encode() + b"\n"
