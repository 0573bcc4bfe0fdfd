"""An HTTPS server in a thread with one event loop of its own, whose state is reached by calls from other threads."""

import asyncio
import contextlib
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from types import TracebackType
from typing import Any, Self, TypeVar

import uvicorn
from starlette.types import ASGIApp

from potluck.control.address import https_url
from potluck.control.identity import Identity
from potluck.errors import BadInput, PotluckError

Result = TypeVar("Result")

_SLICE_S = 0.2
_LAST_ANSWERS_S = 0.3


class HttpsServer:
    """Serves from ``with`` to the end of its block, on one address and no other."""

    def __init__(
        self,
        identity: Identity,
        address: str,
        port: int,
        app: ASGIApp,
        *,
        beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
        on_stop: Callable[[], object] | None = None,
    ) -> None:
        """Bind the address; nobody is answered before ``with``.

        Args:
            identity: whose certificate is shown.
            address: numeric, of this machine.
            port: 0 takes a free one; ``self.port`` is the one taken.
            app: answers the requests.
            beside: runs in the event loop while there is service, and is cancelled at its end.
            on_stop: called in the event loop at the end, to let go the requests that wait for something.

        Raises:
            BadInput: the address or port cannot be listened on.
        """
        self._socket = _listening(address, port)
        self.port = int(self._socket.getsockname()[1])
        self.url = https_url(address, self.port)
        self._beside = beside
        self._on_stop = on_stop
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
        self._thread = threading.Thread(target=self._run, name="potluck server", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        while not self._server.started:
            if not self.serves:
                raise PotluckError(f"The server at {self.url} did not start.")
            time.sleep(0.005)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        if self._on_stop is not None:
            self.call_soon(self._on_stop)
        self._thread.join(timeout=_LAST_ANSWERS_S)
        # clients that keep their connection open, as they do, would be waited for
        self.call_soon(self._cut_connections)
        self._thread.join(timeout=10)

    @property
    def serves(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def call(self, function: Callable[[], Result]) -> Result:
        """Run a function in the event loop, from another thread.

        Raises:
            PotluckError: the server has stopped.
        """
        done: Future[Result] = Future()

        def call() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self.call_soon(call)
        while not done.done():
            if not self.serves:
                raise PotluckError(f"The server at {self.url} has stopped.")
            wait([done], timeout=_SLICE_S)
        return done.result()

    def call_soon(self, function: Callable[[], object]) -> None:
        """Run a function in the event loop and do not wait for it; not at all if the server has stopped."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it was closed a moment ago
                self._loop.call_soon_threadsafe(function)

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            self._loop.set_exception_handler(_without_broken_connections)
            runner.run(self._serve())

    async def _serve(self) -> None:
        beside = None if self._beside is None else asyncio.create_task(self._beside())
        try:
            await self._server.serve(sockets=[self._socket])
        finally:
            if beside is not None:
                beside.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await beside

    def _cut_connections(self) -> None:
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()


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
