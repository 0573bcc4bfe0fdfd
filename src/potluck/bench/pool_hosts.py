"""The emulated devices of ``bench pool`` as this program sees them: told what to do, listened to, and all ended."""

import json
import queue
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from potluck.bench.pool_spec import Event, RankSpec, encoded
from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.pool.process import Arrivals, LocalDevice, end_all
from potluck.testbed.state import Testbed, TestDevice

# One thread: a process that forks must have no others. -P: nothing is imported from where the person happens to be.
_COMMAND = ("env", "OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1", sys.executable, "-P", "-m", "potluck.bench.pool_host")
_SETTLE_S = 2.0
_GRACE_S = 3.0


class Host(LocalDevice):
    """The process of one device that forks its ranks."""

    def __init__(self, device: TestDevice) -> None:
        super().__init__({"name": device.name}, device.command(list(_COMMAND)))
        self.device = device

    def tell(self, said: Mapping[str, Any]) -> None:
        """Say one line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encoded(said))
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: what it says no more is missed where an answer is waited for


class Hosts:
    """All devices of a testbed; what is asked of several is answered by each of them once."""

    def __init__(self, bed: Testbed, scratch: Path) -> None:
        """Take them over; :func:`hosts_of` starts and ends them."""
        self.bed = bed
        self.imported_bytes = 0
        """Of one device's process before it forks: what its ranks share."""
        self._scratch = scratch
        self._hosts = {device.name: Host(device) for device in bed.devices}
        self._arrivals: Arrivals = queue.Queue()
        self._stores = 0

    def start(self) -> None:
        """Start them all and wait until each has imported what it needs.

        Raises:
            PotluckError: one could not.
        """
        for host in self._hosts.values():
            host.start(self._arrivals)
        started = self._answers("hosting", list(self._hosts))
        self.imported_bytes = max(each["imported_bytes"] for each in started.values())
        if crowded := [name for name, each in started.items() if each["threads"] != 1]:
            raise PotluckError(
                f"{', '.join(crowded)}: a library starts threads when it is imported, and then no process can be"
                " forked safely. OPENBLAS_NUM_THREADS=1 prevents it for those known here."
            )

    def begin(self, name: str, specs: Sequence[RankSpec], answer: str) -> list[Event]:
        """Fork one rank a spec and wait for the event ``answer`` of each, in the order of the specs.

        Raises:
            BadInput, DeviceLost, PotluckError: what a rank reported.
        """
        self._stores += 1
        store = str(self._scratch / f"store-{self._stores}")
        for spec in specs:
            told = spec.model_copy(update={"store": store})
            self._hosts[spec.device].tell({"do": "begin", "name": name, "spec": told.model_dump(mode="json")})
        return self._paused_answers(name, [spec.device for spec in specs], answer)

    def tell(self, name: str, devices: Sequence[str], command: Mapping[str, Any], answer: str) -> list[Event]:
        """Hand a command on to the ranks of a strategy and wait for the event ``answer`` of each.

        Raises:
            BadInput, DeviceLost, PotluckError: what a rank reported.
        """
        for device in devices:
            self._hosts[device].tell({"do": "tell", "name": name, "command": command})
        return self._paused_answers(name, devices, answer)

    def end(self, name: str, devices: Sequence[str]) -> None:
        """Let the ranks of a strategy end, and wait until they have."""
        for device in devices:
            self._hosts[device].tell({"do": "end", "name": name})
        self._answers("ended", devices)

    def close(self) -> None:
        """End every process."""
        end_all(list(self._hosts.values()), _GRACE_S)

    def _paused_answers(self, name: str, devices: Sequence[str], answer: str) -> list[Event]:
        """The answers of all ranks, which are stopped only then: until the last one has answered, it needs others."""
        found = self._answers(answer, devices)
        for device in devices:
            self._hosts[device].tell({"do": "pause", "name": name})
        return [found[device] for device in devices]

    def _answers(self, kind: str, devices: Sequence[str]) -> dict[str, Event]:
        """One event of ``kind`` from each of these devices, by name; anything wrong is raised, the cause first."""
        found: dict[str, Event] = {}
        failures: list[tuple[int, PotluckError]] = []
        deadline = float("inf")
        while len(found) < len(set(devices)) and time.monotonic() < deadline:
            try:
                host, said = self._arrivals.get(timeout=0.2)
            except queue.Empty:
                continue
            event = _event(host, said)
            if said is None:
                failures.append((1, _crashed(host, host.ending(finished=False, grace_s=_GRACE_S) or "ended")))
            elif event is None:
                host.remember(said if isinstance(said, bytes) else b"")
            elif event["event"] == "error":
                failures.append(_reported(host, event))
            elif event["event"] == "ended" and event["status"] != 0:
                failures.append((1 if event["status"] < 0 else 4, _crashed(host, _ending(event))))
            elif event["event"] == kind:
                found[host.name] = event
            if failures:
                deadline = min(deadline, time.monotonic() + _SETTLE_S)
        if failures:
            raise min(failures, key=lambda failure: failure[0])[1]
        return found


@contextmanager
def hosts_of(bed: Testbed, scratch: Path) -> Iterator[Hosts]:
    """The devices of a testbed, started; ended whatever happens."""
    hosts = Hosts(bed, scratch)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.close()


def _event(host: Any, said: Event | bytes | None) -> Event | None:
    if not isinstance(said, bytes):
        return said
    try:
        event = json.loads(said)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def _reported(host: Any, event: Event) -> tuple[int, PotluckError]:
    """What a rank said, and how near to the cause it is."""
    message = str(event["message"])
    if event["exit_code"] == BadInput.exit_code:
        return 0, BadInput(message)
    if event["lost_a_peer"]:
        return 3, DeviceLost(f"{host.name} ('{event['name']}'): {message}")
    return 2, PotluckError(f"{host.name} ('{event['name']}'): {message}")


def _ending(event: Event) -> str:
    status = event["status"]
    how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"('{event['name']}') {how}"


def _crashed(host: Any, how: str) -> PotluckError:
    words = host.last_words()
    return DeviceLost(f"{host.name} {how}." + (f" Its last words were:\n{words}" if words else ""))
