"""One emulated device of ``bench pool``: has everything imported, and forks a process a strategy.

``python -m potluck.bench.pool_host`` reads lines of :mod:`potluck.bench.pool_spec` from stdin. ``begin`` forks a rank,
``tell`` hands a line on to it, ``pause`` stops it until the next line, since Gloo's threads wake a hundred times a
second even where nothing is to be done, and ``end`` closes its pipe, by which it ends.

Forking makes a rank in milliseconds where imports take seconds, and lets ranks share the memory of what was imported.
It is safe because this process has one thread: it never computes, and the first event says whether a library has
started a pool of its own.
"""

import ctypes
import gc
import os
import selectors
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from potluck.bench.pool_rank import run_rank
from potluck.bench.pool_spec import Event, Lines, RankSpec, encoded
from potluck.errors import DeviceLost, PotluckError
from potluck.models.memory import free_at_once, memory_mib

_READ = 1 << 16
_COMMANDS = 0
_PR_SET_PDEATHSIG = 1


@dataclass(eq=False)
class _Rank:
    name: str
    process: int
    ended: int
    """A file descriptor that tells when it has ended."""
    pipe: int | None
    """To it; None when it was closed."""

    def close(self) -> None:
        """Let it end after what it was told."""
        if self.pipe is not None:
            os.close(self.pipe)
            self.pipe = None


class _Host:
    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._ranks: dict[str, _Rank] = {}

    def run(self) -> None:
        """Fork and hand on, until stdin ends; then the kernel ends the ranks."""
        lines = Lines()
        with selectors.DefaultSelector() as arrivals:
            arrivals.register(_COMMANDS, selectors.EVENT_READ)
            while True:
                for key, _ in arrivals.select():
                    if key.data is not None:
                        arrivals.unregister(key.fd)
                        self._reap(self._ranks.pop(key.data))
                        continue
                    data = os.read(_COMMANDS, _READ)
                    if not data:
                        return
                    for said in lines.feed(data):
                        if said.get("do") == "begin":
                            rank = self._forked(said["name"], RankSpec.model_validate(said["spec"]))
                            arrivals.register(rank.ended, selectors.EVENT_READ, rank.name)
                        else:
                            self._hand_on(said)

    def _forked(self, name: str, spec: RankSpec) -> _Rank:
        read, write = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(write)
            for other in self._ranks.values():
                other.close()
                os.close(other.ended)
            _be_rank(name, spec, read, self._emit)
        os.close(read)
        self._ranks[name] = rank = _Rank(name, process, os.pidfd_open(process), write)
        return rank

    def _hand_on(self, said: dict[str, Any]) -> None:
        rank = self._ranks.get(said.get("name", ""))
        if rank is None or rank.pipe is None:
            return
        os.kill(rank.process, signal.SIGSTOP if said["do"] == "pause" else signal.SIGCONT)
        if said["do"] == "end":
            rank.close()
        elif said["do"] == "tell":
            with suppress(BrokenPipeError):  # it has ended, which is told when its output closes
                os.write(rank.pipe, encoded(said["command"]))

    def _reap(self, rank: _Rank) -> None:
        _, status = os.waitpid(rank.process, 0)
        os.close(rank.ended)
        rank.close()
        self._emit({"event": "ended", "name": rank.name, "status": os.waitstatus_to_exitcode(status)})


def main() -> None:
    """Be the host of one device."""
    events = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between the events

    def emit(event: Event) -> None:
        os.write(events, encoded(event))

    free_at_once()
    gc.collect()
    gc.freeze()  # or the collector would touch, and so copy, every page in every rank
    threads = len(list(Path("/proc/self/task").iterdir()))
    emit({"event": "hosting", "imported_bytes": int(memory_mib("VmRSS") * 2**20), "threads": threads})
    _Host(emit).run()


def _be_rank(name: str, spec: RankSpec, commands: int, emit: Callable[[Event], None]) -> NoReturn:
    """Be a rank in the forked process, and never return to what the host does."""
    status = 1
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # it may be stopped, and then reads no end

    def tell(event: Event) -> None:
        emit({**event, "name": name})

    try:
        run_rank(spec, _read_commands(commands), tell)
        status = 0
    except PotluckError as error:
        code, lost = error.exit_code, isinstance(error, DeviceLost)
        tell({"event": "error", "message": str(error), "exit_code": code, "lost_a_peer": lost})
    except BaseException as error:
        traceback.print_exc()
        said = f"{name} failed: {type(error).__name__}: {error}"[:2000]
        tell({"event": "error", "message": said, "exit_code": 1, "lost_a_peer": False})
    finally:
        sys.stderr.flush()
        os._exit(status)


def _read_commands(pipe: int) -> Iterator[dict[str, Any]]:
    lines = Lines()
    while data := os.read(pipe, _READ):
        yield from lines.feed(data)


if __name__ == "__main__":
    main()
