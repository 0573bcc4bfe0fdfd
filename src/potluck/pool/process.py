"""A device as a process of this machine: started with its spec, read from, and ended."""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Protocol

Event = dict[str, Any]
Arrivals = queue.Queue[tuple["Device", Event | bytes | None]]
"""What devices say, each with the device it came from: events, lines not yet read as such, and None when it will say no
more."""

_STDERR_KEPT = 64 * 1024
_LAST_WORDS = 2_000


class Device(Protocol):
    """A device that runs somewhere: here as a process, or on another machine."""

    name: str

    def start(self, arrivals: Arrivals) -> None:
        """Tell it its spec, and put what it says into ``arrivals``."""
        ...

    def remember(self, text: bytes) -> None:
        """Keep what was written for people, for the case that it says why the device failed."""
        ...

    def last_words(self) -> str:
        """The end of what it wrote for people."""
        ...

    def ending(self, finished: bool, grace_s: float) -> str | None:
        """How it ended, as the rest of a sentence, when it will say no more; None where all is well."""
        ...

    def crashed(self) -> bool:
        """Whether its last words tell why it ended."""
        ...

    def ask_to_end(self) -> None:
        """Ask it to end."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        ...

    def end(self) -> None:
        """End it for certain, and let go of what it needed here."""
        ...


class LocalDevice:
    """One process that reads a JSON line (its spec) from stdin and writes JSON lines (its events) to stdout.

    It has a session of its own, so that Ctrl-C reaches only the parent.
    """

    def __init__(self, spec: Mapping[str, object], command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.name = str(spec.get("name", f"process {self._process.pid}"))
        self._spec = spec
        self._stderr = bytearray()
        self._readers: list[threading.Thread] = []

    def start(self, arrivals: Arrivals) -> None:
        """Tell it its spec, and put the lines it writes into ``arrivals``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read_events, args=(self._process.stdout, arrivals), daemon=True),
            threading.Thread(target=self._read_stderr, args=(self._process.stderr,), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        try:
            self._process.stdin.write(json.dumps(dict(self._spec)).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already: its exit status says more

    def remember(self, text: bytes) -> None:
        """Keep what was written for people, for the case that it says why the device failed."""
        self._stderr += text
        del self._stderr[:-_STDERR_KEPT]

    def last_words(self) -> str:
        """The end of what it wrote for people."""
        return self._stderr[-_LAST_WORDS:].decode(errors="replace").strip()

    def ending(self, finished: bool, grace_s: float) -> str | None:
        """How it ended, as the rest of a sentence, when its stdout has closed; None where all is well."""
        status: int | None
        try:
            status = self._process.wait(timeout=grace_s)
        except subprocess.TimeoutExpired:
            status = 0 if finished else None
        if finished and status == 0:
            return None
        self._readers[1].join(timeout=1.0)
        return _status_in_words(status)

    def crashed(self) -> bool:
        """Whether it left with an exit code of its own, so that its last words tell why."""
        return (self._process.returncode or 0) > 0

    def ask_to_end(self) -> None:
        """Ask it, and whatever it started, to end."""
        self._signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within this time."""
        try:
            self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """End it for certain."""
        self._signal(signal.SIGKILL)
        self._process.wait()
        for reader in self._readers:
            reader.join(timeout=1.0)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            _close(stream)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def _read_events(self, stdout: IO[bytes], arrivals: Arrivals) -> None:
        for line in stdout:
            arrivals.put((self, line))
        arrivals.put((self, None))

    def _read_stderr(self, stderr: IO[bytes]) -> None:
        while text := os.read(stderr.fileno(), 4096):
            self.remember(text)


def _status_in_words(status: int | None) -> str:
    if status is None:
        return "closed its output and went on running"
    if status >= 0:
        return f"ended with exit code {status} without saying why"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = "unknown"
    reasons = {
        "SIGKILL": "; perhaps the machine ran out of memory",
        "SIGILL": "; its processor lacks an instruction that this build of torch uses: install a build of torch"
        " made for this processor",
    }
    return f"was killed by signal {-status} ({name}){reasons.get(name, '')}"


def _close(stream: IO[bytes] | None) -> None:
    try:
        if stream is not None:
            stream.close()
    except BrokenPipeError:
        pass  # what was left to tell a device that is gone


def end_all(devices: Sequence[Device], grace_s: float) -> None:
    """End every device that still runs; a second Ctrl-C skips the grace."""
    try:
        for device in devices:
            device.ask_to_end()
        deadline = time.monotonic() + grace_s
        for device in devices:
            if not device.wait(max(0.0, deadline - time.monotonic())):
                break
    finally:
        for device in devices:
            device.end()
