"""The server's thread: what is called in its loop, what runs beside it, and how it ends."""

import asyncio
import threading
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from potluck.control.identity import Identity
from potluck.control.server import HttpsServer
from potluck.errors import BadInput, PotluckError

LOCAL = "127.0.0.1"


async def name(request: Request) -> Response:
    return PlainTextResponse(threading.current_thread().name)


APP = Starlette(routes=[Route("/", name)])


def get(server: HttpsServer) -> str:
    with httpx.Client(verify=False, trust_env=False) as client:
        return client.get(server.url).text


def test_calls_run_in_the_thread_that_answers(identity: Identity) -> None:
    with HttpsServer(identity, LOCAL, 0, APP) as server:
        assert server.url == f"https://{LOCAL}:{server.port}"
        assert server.call(lambda: threading.current_thread().name) == get(server)
        assert server.call(asyncio.get_running_loop) is server.call(asyncio.get_running_loop)
        with pytest.raises(ZeroDivisionError):
            server.call(lambda: 1 // 0)
        assert get(server) == "potluck server"
    assert not server.serves
    with pytest.raises(PotluckError, match="has stopped"):
        server.call(lambda: None)


def test_a_port_is_free_for_the_next_server_at_once(identity: Identity) -> None:
    with HttpsServer(identity, LOCAL, 0, APP) as server:
        get(server)
        with pytest.raises(BadInput, match=f"{LOCAL} port {server.port} cannot be listened on"):
            HttpsServer(identity, LOCAL, server.port, APP)
    with HttpsServer(identity, LOCAL, server.port, APP) as again:
        assert get(again) == "potluck server"
    with pytest.raises(BadInput, match="no IPv4 or IPv6 address"):
        HttpsServer(identity, "localhost", 0, APP)


def test_what_runs_beside_ends_with_the_service(identity: Identity) -> None:
    heard: list[str] = []

    async def beside() -> None:
        heard.append("begun")
        try:
            await asyncio.sleep(60)
        finally:
            heard.append("ended")

    with HttpsServer(identity, LOCAL, 0, APP, beside=beside, on_stop=lambda: heard.append("stopping")) as server:
        get(server)
        assert heard == ["begun"]
    assert heard == ["begun", "stopping", "ended"]


@pytest.mark.timing
def test_the_end_waits_for_no_idle_client(identity: Identity) -> None:
    with httpx.Client(verify=False, trust_env=False) as client, HttpsServer(identity, LOCAL, 0, APP) as server:
        client.get(server.url)
        start = time.monotonic()
        server.__exit__(None, None, None)
        assert time.monotonic() - start < 2
