"""The HTTP side of the split server: who may ask, how large a request may be, and what each address answers."""

import hmac
import re
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import ConfigDict, Field
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from potluck.control.files import ModelFile, ModelFiles
from potluck.control.model_responses import model_listing, model_ranges
from potluck.control.names import Name
from potluck.control.requests import Body, Refused, bearer, chunks, number, parsed, refusal_handlers, whole
from potluck.control.versions import differences, versions
from potluck.errors import BadInput, SaveFailed
from potluck.split.agreement import Sha256
from potluck.split.keys import key_digest
from potluck.split.shard_file import SHARD_BYTES
from potluck.split.steps import Steps

STEP_BYTES = 64 << 20
_SLACK_BYTES = 1 << 10
_WRITE_BYTES = 1 << 20
_TO_STRANGERS = "This is a potluck server: contribute to it with 'potluck contribute INVITE'."

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Result:
    """What was trained: files in a directory, and what is to be said of them."""

    state: str
    directory: Path
    files: tuple[ModelFile, ...]


class Backend(Protocol):
    """What the server does. All methods are called in worker threads, several at once; ``client`` is its name.

    ``BadInput`` becomes a refusal with its sentence; ``SaveFailed`` tells the client that the server has no room.
    """

    takes_steps: bool
    """Whether clients stay connected and take steps."""

    def register(self, name: str, key_digest: str) -> None:
        """Know a client, on disk; ``BadInput`` where the name has another key already."""

    def client(self, key_digest: str) -> str | None:
        """The name of the client that has this key, or None."""

    def terms(self, client: str) -> dict[str, Any]:
        """What a client is to know and do, as JSON."""

    def missing(self, client: str, shas: list[str]) -> list[str]:
        """Those of the shards that are not here."""

    def incoming(self) -> AbstractContextManager[Path]:
        """A path for a shard to be written to, gone at the end of the block unless it was accepted."""

    def accept(self, client: str, path: Path, sha256: str) -> None:
        """Check a shard and keep it; ``BadInput`` says what is wrong with it."""

    def commit(self, client: str, contribution: str, manifest: dict[str, Any]) -> None:
        """Make shards a contribution."""

    def withdraw(self, client: str) -> None:
        """Delete what the client contributed."""

    def result(self) -> Result | None:
        """What was trained, or None as long as there is nothing."""

    def step(self, client: str, number: int, body: bytes) -> Future[bytes]:
        """Take a step's message, once each; the answer may be given by another thread, at any time."""

    def alive(self, client: str) -> None:
        """The client is still here."""


class Hello(Body):
    """How a client introduces itself, showing the invite's secret."""

    name: Name
    key_digest: Sha256
    versions: Annotated[dict[str, str], Field(max_length=16)]


class Shas(Body):
    """Shards by their SHA-256."""

    shas: Annotated[list[Sha256], Field(max_length=100_000)]


class Manifest(Body):
    """A contribution's manifest; the backend knows what is in it."""

    model_config = ConfigDict(extra="allow", strict=True)


class SplitRoutes:
    """The handlers over one backend."""

    def __init__(self, backend: Backend, files: ModelFiles, secret: str, *, slice_s: float) -> None:
        self._backend = backend
        self._files = files
        self._secret = secret
        self.steps = Steps(backend.step, slice_s)

    def app(self) -> Starlette:
        """The application; every refusal is JSON with a ``message``, and strangers are told nothing else."""
        handlers = refusal_handlers("server")
        unknown = handlers[HTTPException]

        async def unknown_to_clients(request: Request, error: Exception) -> Response:
            try:
                await self._client(request)
            except Refused as refused:
                return await handlers[Refused](request, refused)
            return await unknown(request, error)

        async def no_room(request: Request, error: Exception) -> Response:
            # without the error's sentence: the server's directories are none of a client's business
            return JSONResponse({"message": "The server's disk is full or failed."}, status_code=507)

        return Starlette(
            routes=[
                Route("/hello", self._hello, methods=["POST"]),
                Route("/alive", self._alive, methods=["POST"]),
                Route("/model", self._model, methods=["GET"]),
                Route("/model/ranges", self._model_ranges, methods=["POST"]),
                Route("/shards/missing", self._missing, methods=["POST"]),
                Route("/shards/{sha256}", self._shard, methods=["PUT"]),
                Route("/contributions/{contribution}", self._commit, methods=["PUT"]),
                Route("/contributions", self._withdraw, methods=["DELETE"]),
                Route("/result", self._result, methods=["GET"]),
                Route("/result/{name}", self._result_file, methods=["GET"]),
                Route("/step", self._step, methods=["POST"]),
                Route("/step", self._step_answer, methods=["GET"]),
            ],
            exception_handlers={**handlers, HTTPException: unknown_to_clients, SaveFailed: no_room},
        )

    async def _hello(self, request: Request) -> Response:
        if not hmac.compare_digest(bearer(request, _TO_STRANGERS).encode(), self._secret.encode()):
            raise Refused(401, "The invite's secret is wrong: it belongs to another server. Ask for a new invite.")
        hello = await parsed(request, Hello)
        if difference := differences(versions(), hello.versions):
            raise Refused(409, difference)
        await _in_thread(409, lambda: self._backend.register(hello.name, hello.key_digest))
        return JSONResponse(await _in_thread(409, lambda: self._backend.terms(hello.name)))

    async def _alive(self, request: Request) -> Response:
        client = await self._client(request)
        await _in_thread(409, lambda: self._backend.alive(client))
        return Response(status_code=204)

    async def _model(self, request: Request) -> Response:
        await self._client(request)
        return await model_listing(self._files)

    async def _model_ranges(self, request: Request) -> Response:
        await self._client(request)
        return await model_ranges(self._files, request)

    async def _missing(self, request: Request) -> Response:
        client = await self._client(request)
        wanted = await parsed(request, Shas)
        return JSONResponse({"missing": await _in_thread(422, lambda: self._backend.missing(client, wanted.shas))})

    async def _shard(self, request: Request) -> Response:
        client, sha256 = await self._client(request), _digest(request, "sha256")
        with self._backend.incoming() as path:
            await _stream_to(path, request, SHARD_BYTES + _SLACK_BYTES, "A shard")
            await _in_thread(422, lambda: self._backend.accept(client, path, sha256))
        return Response(status_code=204)

    async def _commit(self, request: Request) -> Response:
        client, contribution = await self._client(request), _digest(request, "contribution")
        manifest = (await parsed(request, Manifest)).model_dump()
        await _in_thread(422, lambda: self._backend.commit(client, contribution, manifest))
        return Response(status_code=204)

    async def _withdraw(self, request: Request) -> Response:
        client = await self._client(request)
        await _in_thread(422, lambda: self._backend.withdraw(client))
        return Response(status_code=204)

    async def _result(self, request: Request) -> Response:
        result = await self._trained(request)
        return JSONResponse({"state": result.state, "files": [file._asdict() for file in result.files]})

    async def _result_file(self, request: Request) -> Response:
        result, name = await self._trained(request), request.path_params["name"]
        if name not in {file.name for file in result.files}:
            raise Refused(404, f"The result has no {name}.")
        return FileResponse(result.directory / name, media_type="application/octet-stream")

    async def _step(self, request: Request) -> Response:
        client = await self._client(request)
        if not self._backend.takes_steps:
            raise Refused(409, "This server's scheme is one-shot: clients upload once, and take no steps.")
        body = await whole(request, STEP_BYTES, "A step's message")
        self.steps.send(client, number(request, "number"), body)
        return await self._answered(client, request)

    async def _step_answer(self, request: Request) -> Response:
        return await self._answered(await self._client(request), request)

    async def _answered(self, client: str, request: Request) -> Response:
        answer = await self.steps.answer(client, number(request, "number"))
        return Response(status_code=204) if answer is None else Response(answer, media_type="application/octet-stream")

    async def _trained(self, request: Request) -> Result:
        await self._client(request)
        result = await _in_thread(409, self._backend.result)
        if result is None:
            raise Refused(404, "Nothing has been trained yet.")
        return result

    async def _client(self, request: Request) -> str:
        """The client that asks.

        Raises:
            Refused: it is none of this server's.
        """
        digest = key_digest(bearer(request, _TO_STRANGERS))
        client = await run_in_threadpool(self._backend.client, digest)
        if client is None:
            raise Refused(401, "The server does not know this client: contribute with the invite it prints.")
        return client


async def _stream_to(path: Path, request: Request, limit: int, what: str) -> None:
    """Write a request's body to a file; memory stays flat.

    Raises:
        Refused: see :func:`potluck.control.requests.chunks`, or the server's disk does not take it.
    """
    try:
        with path.open("wb", buffering=_WRITE_BYTES) as file:
            async for chunk in chunks(request, limit, what):
                await run_in_threadpool(file.write, chunk)
    except OSError as error:
        raise Refused(507, f"The server cannot store the upload: {error.strerror}.") from None


async def _in_thread(status: int, function: Callable[[], Answer]) -> Answer:
    """Call a function that may wait for a disk.

    Raises:
        Refused: with ``status`` where it refuses.
    """
    try:
        return await run_in_threadpool(function)
    except BadInput as error:
        raise Refused(status, str(error)) from None


def _digest(request: Request, name: str) -> str:
    text = str(request.path_params[name])
    if not re.fullmatch(r"[0-9a-f]{64}", text):
        raise Refused(400, f"{name} is a SHA-256 in 64 hexadecimal digits.")
    return text
