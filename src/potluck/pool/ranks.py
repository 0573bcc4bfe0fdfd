"""What the ranks of a launch tell each other by the launcher's store.

Every wait is a look now and then: a process that is blocked within the store could not be interrupted, and would not
hear that another rank has ended.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from potluck.errors import BadInput, DeviceLost, PotluckError, in_words

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_CONNECT_S = 600.0  # a scheduler may start its ranks minutes apart
_TRY_S = 5.0
_LOOK_EVERY_S = 0.05
_CAUSE_S = 2.0
_FAREWELL_S = 3.0
_LATECOMERS_S = 30.0  # that far apart processes started together may come to their work
_CAME, _ENDED, _LEFT = "came", "ended", "left"


@dataclass(frozen=True)
class Launch:
    """This process's place among those that were started."""

    rank: int
    world_size: int
    processes_here: int
    host: str
    """Where the launcher's store is."""
    port: int
    served: bool = False
    """Whether the launcher itself serves the store; otherwise rank 0 does."""
    attempt: str = "0"
    """How often the launcher has started all ranks anew."""


def launch_of(environment: Mapping[str, str]) -> Launch | None:
    """What a launcher has set; None where there is none, or it started one process alone.

    Raises:
        BadInput: it has set a part of what is needed, or what it has set makes no sense.
    """
    if "RANK" not in environment or environment.get("WORLD_SIZE") == "1":
        return None
    if missing := [name for name in _VARIABLES if name not in environment]:
        raise BadInput(
            f"RANK is set, as a launcher does, but {' and '.join(missing)} not: set them too, or unset RANK."
        )
    rank, world_size, port = (_number(environment, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    if rank >= world_size:
        raise BadInput(f"RANK={rank}: with WORLD_SIZE={world_size}, ranks go from 0 to {world_size - 1}.")
    if not 0 < port < 65536:
        raise BadInput(f"MASTER_PORT={port} is no port.")
    return Launch(
        rank=rank,
        world_size=world_size,
        processes_here=max(1, _number({"LOCAL_WORLD_SIZE": "1", **environment}, "LOCAL_WORLD_SIZE")),
        host=environment["MASTER_ADDR"],
        port=port,
        served=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


class Ranks:
    """All ranks of a launch; the first one that ends with an error tells the others why."""

    def __init__(self, launch: Launch) -> None:
        """Connect to the launcher's store.

        Raises:
            DeviceLost: it does not answer.
        """
        self.launch = launch
        self.name = f"rank-{launch.rank}"
        self._where = f"{launch.host}:{launch.port}"
        self.store: Store = PrefixStore(f"potluck/{launch.attempt}", self._connected())
        self.store.add(_CAME, 1)

    def say(self, key: str, content: object) -> None:
        """Tell all ranks something, as JSON.

        Raises:
            DeviceLost: the store does not answer any more.
        """
        try:
            self.store.set(key, json.dumps(content))
        except RuntimeError as error:
            raise self._lost(error) from error

    def hear(self, key: str) -> Any:
        """What was said under a key, waited for; None where all ended well instead.

        Raises:
            PotluckError: another rank has ended with an error.
            DeviceLost: the store does not answer any more.
        """
        while True:
            if (said := self._look(key)) is not None:
                return said
            if (ended := self._look(_ENDED)) is not None:
                _raise_told(ended)
                return None
            time.sleep(_LOOK_EVERY_S)

    def cause(self) -> None:
        """Raise what another rank has ended with, if it says so soon."""
        deadline = time.monotonic() + _CAUSE_S
        while time.monotonic() < deadline:
            if (ended := self._look(_ENDED)) is not None and ended["rank"] != self.launch.rank:
                _raise_told(ended)
            time.sleep(_LOOK_EVERY_S)

    def end(self, error: BaseException | None) -> None:
        """Tell the others how this rank has ended; rank 0, which may serve the store, waits a little until they know.

        The first of all ranks that ends with an error is the one they hear of.
        """
        rank, told = self.launch.rank, None
        if error is not None:
            said = in_words(error, self.name)
            told = said if self.name in said or isinstance(error, BadInput) else f"{self.name}: {said}"
        refused = isinstance(error, BadInput)
        try:
            self.store.compare_set(_ENDED, "", json.dumps({"rank": rank, "error": told, "refused": refused}))
            left = self.store.add(_LEFT, 1)
            interrupted = error is not None and not isinstance(error, Exception)
            all_here = interrupted or self.store.add(_CAME, 0) == self.launch.world_size
            deadline = time.monotonic() + (_FAREWELL_S if all_here else _LATECOMERS_S)
            while rank == 0 and left < self.launch.world_size and time.monotonic() < deadline:
                time.sleep(_LOOK_EVERY_S)
                left = self.store.add(_LEFT, 0)
        except RuntimeError:
            pass  # whoever served the store has ended, and the others notice as this rank did

    def _look(self, key: str) -> Any:
        try:
            return json.loads(self.store.get(key)) if self.store.check([key]) else None
        except RuntimeError as error:
            raise self._lost(error) from error

    def _connected(self) -> Store:
        launch = self.launch
        serves = launch.rank == 0 and not launch.served
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                return TCPStore(
                    launch.host,
                    launch.port,
                    launch.world_size,
                    serves,
                    timeout=timedelta(seconds=_TRY_S),
                    wait_for_workers=False,
                )
            except (RuntimeError, ValueError) as error:
                if serves or time.monotonic() > deadline:
                    raise self._lost(error) from None

    def _lost(self, error: Exception) -> DeviceLost:
        return DeviceLost(f"The launcher's store at {self._where} does not answer ({str(error).splitlines()[0]}).")


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise BadInput(f"{name}={text} is no whole number, which a launcher would set.")
    return int(text)


def _raise_told(ended: Mapping[str, Any]) -> None:
    if ended["error"] is not None:
        raise (BadInput if ended["refused"] else PotluckError)(ended["error"])
