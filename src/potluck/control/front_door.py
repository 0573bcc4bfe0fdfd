"""The coordinator's HTTPS server: a thread with one event loop that holds all state; called from other threads."""

import asyncio
import contextlib
import ipaddress
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn

from potluck.control.client import Access
from potluck.control.files import ModelFiles
from potluck.control.identity import Identity
from potluck.control.invite import Invite
from potluck.control.members import Arrivals, Member, Roster
from potluck.control.routes import Routes
from potluck.control.values import Values
from potluck.errors import BadInput, PotluckError

Result = TypeVar("Result")

_SLICE_S = 0.2
_LAST_ANSWERS_S = 0.3


class FrontDoor:
    """Serves from ``with`` to the end of its block, on one address and no other.

    ``arrivals`` holds ``(name, event)`` as members tell them, in order and once each; ``(name, None)`` comes once, as
    the last of a member that left, was silent for ``silent_s``, or did not fetch what it was to do. A member that said
    why it leaves has ``{"event": "left", "message": ...}`` before that. Nothing arrives before all places are taken.
    """

    def __init__(
        self,
        identity: Identity,
        address: str,
        *,
        port: int = 0,
        places: int,
        invite_s: float,
        taken_names: Collection[str] = (),
        files: ModelFiles | None = None,
        silent_s: float = 20.0,
        grace_s: float = 3.0,
    ) -> None:
        """Bind the address; nobody is answered before ``with``.

        Args:
            identity: whose certificate is shown.
            address: numeric, of this machine.
            port: 0 takes a free one.
            places: how many members can join.
            invite_s: seconds from now for which the invite holds.
            taken_names: of devices that are in the pool without joining.
            files: handed out to members; None if none are.
            silent_s: seconds without a sign of life after which a member counts as gone.
            grace_s: seconds for which the end of the block waits until members have fetched that it is the end.

        Raises:
            BadInput: the address or port cannot be listened on.
        """
        secret, own_token = secrets.token_urlsafe(16), secrets.token_urlsafe(32)
        self._socket = _listening(address, port)
        port = self._socket.getsockname()[1]
        host = f"[{address}]" if ":" in address else address
        self.invite = Invite(address, port, identity.fingerprint, secret)
        self.access = Access(f"https://{host}:{port}", identity.fingerprint, own_token)
        self._identity = identity
        self._values = Values()
        self._roster = Roster(
            secret=secret, places=places, invite_s=invite_s, taken_names=taken_names, silent_s=silent_s
        )
        self._places = places
        self._grace_s = grace_s
        self.arrivals: Arrivals = self._roster.arrivals
        app = Routes(self._roster, self._values, files, own_token).app()
        self._server = uvicorn.Server(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                interface="asgi3",
                log_config=None,
                log_level="critical",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=2,
                ssl_certfile=identity.certificate,
                ssl_keyfile=identity.key,
            )
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="potluck front door", daemon=True)
        self._ended = False

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise PotluckError(f"The coordinator's server at {self.access.url} did not start.")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._thread.is_alive():
                self.end("The coordinator has ended the training.")
                deadline = time.monotonic() + self._grace_s
                while time.monotonic() < deadline and not self._call(self._roster.all_told_end):
                    time.sleep(0.02)
        finally:
            self._server.should_exit = True
            self._call_soon(self._roster.wake)
            self._call_soon(self._values.begin)  # refuses who waits for a key
            self._thread.join(timeout=_LAST_ANSWERS_S)
            # members that keep their connection open, as they do, would be waited for
            self._call_soon(self._cut_connections)
            self._thread.join(timeout=10)

    def wait_for_members(
        self, on_join: Callable[[Member], None], on_leave: Callable[[str, str], None] | None = None
    ) -> list[Member]:
        """Block until all places are taken; the members in the order of joining.

        Args:
            on_join: called in this thread with each member as it joins.
            on_leave: called with name and reason where one leaves again before that; its place is free again.

        Raises:
            PotluckError: the invite expired before all had come.
        """
        members: list[Member] = []
        while len(members) < self._places:
            try:
                # in slices: a blocking get without a timeout would not be interrupted by Ctrl-C everywhere
                member, left = self._roster.changes.get(timeout=_SLICE_S)
            except queue.Empty:
                if self._call(self._roster.invite_expired) and self._roster.changes.empty():
                    raise PotluckError(
                        f"The invite expired when {len(members)} of {self._places} devices had joined: start again, "
                        "and use the new invite."
                    ) from None
                continue
            if left is None:
                members.append(member)
                on_join(member)
            else:
                members.remove(member)
                if on_leave is not None:
                    on_leave(member.name, left)
        return members

    def send(self, name: str, instruction: dict[str, Any]) -> None:
        """Leave an instruction for a member, which fetches them in order.

        What is left for one that is gone is dropped: ``arrivals`` tells that it is gone.
        """
        self._call(lambda: self._roster.send(name, instruction))

    def new_generation(self) -> int:
        """Begin the next generation, whose store is empty; its number, from 1."""
        return self._call(self._values.begin)

    def end(self, message: str) -> None:
        """Tell every member to end, and why; only the first call counts."""
        self._call(lambda: self._roster.end(message))

    def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function of the state in the event loop.

        Raises:
            PotluckError: the server has stopped.
        """
        done: Future[Result] = Future()

        def call() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._call_soon(call)
        while not done.done():
            if not self._thread.is_alive():
                raise PotluckError(f"The coordinator's server at {self.access.url} has stopped.")
            wait([done], timeout=_SLICE_S)
        return done.result()

    def _call_soon(self, function: Callable[[], object]) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it was closed a moment ago
                self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_exception_handler(_without_broken_connections)
            runner.run(self._serve())

    def _cut_connections(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()

    async def _serve(self) -> None:
        watch = asyncio.create_task(self._watch())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._roster.silent_s / 4))
            self._roster.remove_silent()


def _listening(address: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        raise BadInput(f"{address!r} is no IPv4 or IPv6 address.") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise BadInput(f"{address} port {port or 'any'} cannot be listened on: {error.strerror}.") from None
    return listener


def _without_broken_connections(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Strangers who send garbage or hang up are no fault of ours, and nothing to print."""
    if not isinstance(context.get("exception"), OSError | ssl.SSLError):
        loop.default_exception_handler(context)
