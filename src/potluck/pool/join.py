"""A machine that takes part in somebody else's pool: does what the coordinator says until it is sent home."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from potluck.control.address import address_towards
from potluck.control.client import Client
from potluck.control.invite import Invite
from potluck.control.names import check_name, host_name
from potluck.errors import BadInput, DeviceLost, PotluckError, from_outside, in_words
from potluck.models.cache import user_cache
from potluck.pool.launch import PeerLost, run_devices
from potluck.pool.local import check_pace, threads_of
from potluck.pool.machine import machine_of
from potluck.pool.process import Event
from potluck.pool.spec import assigned_spec
from potluck.texts.readable import check_readable


@dataclass(frozen=True)
class Ended:
    """How a stay in a pool ended."""

    ok: bool
    """Whether training came to its end, or went on without this device."""
    message: str


@dataclass(frozen=True)
class Guest:
    """What a machine brings to somebody else's pool."""

    name: str = ""
    """How the others call it; its hostname if empty."""
    data: tuple[str, ...] = ()
    """Training data, which stays here unless ``data_may_leave``."""
    threads: int = 0
    """Threads to compute with; 0 for one a core."""
    nice: bool = False
    """Whether to stand back behind what people do on this machine."""
    pace: float | None = None
    """The speed of an emulated device."""
    data_may_leave: bool = False
    """Whether the coordinator's job may send token ids and labels of ``data`` to other devices."""


def join(
    invite: str,
    guest: Guest | None = None,
    *,
    on_event: Callable[[Event], None] = lambda event: None,
    tell: Callable[[str], None] = lambda text: None,
) -> Ended:
    """Take part in the pool of an invite until its coordinator ends it.

    Args:
        invite: what ``potluck tune --peers`` printed.
        guest: what this machine brings.
        on_event: told the events of the device that runs here.
        tell: told what goes on, in sentences.

    Raises:
        BadInput: the invite, the data or the name cannot be used, or the coordinator refuses this device.
        DeviceLost: the coordinator does not answer, or does not answer any more.
        PotluckError: the device failed here.
    """
    guest = guest or Guest()
    name = guest.name or host_name()
    check_name(name)
    check_pace(guest.pace)
    invitation = Invite.decode(invite)
    data = tuple(str(Path(source).absolute()) if Path(source).exists() else source for source in guest.data)
    if data:
        check_readable(data)  # what cannot be read is refused before anybody waits for it
    address = address_towards(invitation.host)
    threads = threads_of(guest.threads, nice=guest.nice, paced=guest.pace is not None)
    tell(f"Joining the pool at {invitation.host} as {name}.")
    client = Client.join(
        invitation,
        name=name,
        address=address,
        has_data=bool(data),
        threads=threads,
        machine=machine_of(threads).model_dump(),
    )
    local = {
        "access": client.access.to_json(),
        "address": address,
        # apart for each coordinator: what one of them announced under a hash need not be what another one means by it
        "cache": str(user_cache() / "model" / invitation.fingerprint.hex()[:16]),
        "nice": guest.nice,
        "pace": guest.pace,
        "threads": threads,
    }
    stay = _Stay(client, name, local, list(data), on_event, tell, data_may_leave=guest.data_may_leave)
    try:
        return stay.until_the_end()
    except _Gone as gone:
        raise gone.error from None
    except BaseException as error:
        client.leave(in_words(error, name))
        raise


class _Stopped(Exception):
    """The coordinator wants this machine's device to end."""


class _Gone(Exception):
    """The coordinator does not answer, or does not know this machine any more: there is nobody to tell anything."""

    def __init__(self, error: PotluckError) -> None:
        super().__init__(str(error))
        self.error = error


class _Stay:
    def __init__(
        self,
        client: Client,
        name: str,
        local: dict[str, Any],
        data: list[str],
        on_event: Callable[[Event], None],
        tell: Callable[[str], None],
        *,
        data_may_leave: bool,
    ) -> None:
        self._client, self._name, self._local, self._data = client, name, local, data
        self._on_event, self._tell, self._data_may_leave = on_event, tell, data_may_leave
        self._instructions: queue.Queue[dict[str, Any] | PotluckError] = queue.Queue()
        self._waiting: dict[str, Any] | None = None
        self._generation = 0

    def until_the_end(self) -> Ended:
        threading.Thread(target=self._poll, daemon=True).start()
        self._tell("Joined. Waiting for the coordinator.")
        while True:
            instruction = self._take()
            if instruction.get("do") == "end":
                self._client.leave("")
                return Ended(bool(instruction.get("ok")), from_outside(instruction.get("message", "")))
            if instruction.get("do") == "run":
                self._run(instruction.get("spec"))

    def _poll(self) -> None:
        """Ask for instructions for as long as the coordinator answers; asking is the heartbeat."""
        try:
            while True:
                instruction = self._client.next()
                if instruction is not None:
                    self._instructions.put(instruction)
                    if instruction.get("do") == "end":
                        return
        except PotluckError as error:
            self._instructions.put(error)
        except Exception as error:  # whatever an answer that is none leads to; or this machine would wait for ever
            self._instructions.put(PotluckError(f"The coordinator's answer makes no sense ({type(error).__name__})."))

    def _take(self, timeout_s: float | None = None) -> dict[str, Any]:
        if self._waiting is not None:
            taken, self._waiting = self._waiting, None
            return taken
        while True:
            try:
                instruction = self._instructions.get(timeout=0.5 if timeout_s is None else timeout_s)
            except queue.Empty:
                if timeout_s is None:
                    continue
                raise
            if isinstance(instruction, PotluckError):
                raise _Gone(instruction)
            return instruction

    def _check(self) -> None:
        """End the device as soon as the coordinator says so, or is gone."""
        try:
            instruction = self._take(timeout_s=0.001)
        except queue.Empty:
            return
        if instruction.get("do") == "end":
            self._waiting = instruction
        raise _Stopped

    def _run(self, told: object) -> None:
        self._generation = told.get("generation", 0) if isinstance(told, dict) else 0
        try:
            spec = assigned_spec(told, self._name, self._data, self._local, data_may_leave=self._data_may_leave)
            run_devices([spec], self._pass_on, check=self._check)
        except _Stopped:
            pass
        except PotluckError as error:
            lost = isinstance(error, PeerLost)
            sentence, *last_words = str(error).splitlines() or [""]
            if last_words:  # they may quote this machine's texts
                self._tell(str(error))
            message = sentence if self._name in sentence else f"{self._name}: {sentence}"
            said = {"event": "error", "kind": "peer" if lost else "own", "message": message}
            self._post({**said, "exit_code": _code(error)})
        self._post({"event": "closed"})

    def _pass_on(self, event: Event) -> None:
        self._on_event(event)
        self._post(event)

    def _post(self, event: Event) -> None:
        try:
            self._client.post([{**event, "generation": self._generation}])
        except PotluckError as error:
            raise _Gone(error) from None


def _code(error: PotluckError) -> int:
    return BadInput.exit_code if isinstance(error, BadInput) else DeviceLost.exit_code
