"""The HTTP side of the front door: who may ask, how large a request may be, and what each address answers."""

import base64
import binascii
import hmac
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from potluck.control.files import ModelFiles
from potluck.control.members import Member, Refused, Roster, Seat
from potluck.control.values import Values
from potluck.errors import BadInput

BODY_BYTES = 8 << 20
STORE_WAIT_S = 10.0
POLL_S = 5.0

Handler = Callable[[Request], Awaitable[Response]]
Checked = TypeVar("Checked", bound="_Body")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Joining(_Body):
    """What a device sends to join."""

    attempt: Annotated[str, Field(min_length=16, max_length=64, pattern=r"^[\w-]+$")]
    member: Member


class Events(_Body):
    """What a member tells, numbered from ``first`` within a stream of its own."""

    stream: Annotated[str, Field(min_length=1, max_length=64)]
    first: Annotated[int, Field(ge=1)]
    events: list[dict[str, Any]]


class Leaving(_Body):
    """Why a member leaves."""

    message: Annotated[str, Field(max_length=10_000)]


class Change(_Body):
    """An addition to a number in the store, or a comparison in base64."""

    request: Annotated[str, Field(min_length=16, max_length=64)]
    add: int | None = None
    expected: str | None = None
    desired: str | None = None


class FileRanges(_Body):
    """Pairs of offset and length in one file."""

    file: str
    ranges: list[Annotated[list[int], Field(min_length=2, max_length=2)]]


@dataclass(frozen=True)
class Routes:
    """The handlers over one pool's state."""

    roster: Roster
    values: Values
    files: ModelFiles | None
    own_token: str
    """The coordinator's own: for the store and the model, not for a member's addresses."""

    def app(self) -> Starlette:
        """The application; every refusal is JSON with a ``message``."""
        store = "/store/{generation:int}/{key:path}"
        return Starlette(
            routes=[
                Route("/join", self._join, methods=["POST"]),
                Route("/next", self._next, methods=["GET"]),
                Route("/events", self._events, methods=["POST"]),
                Route("/leave", self._leave, methods=["POST"]),
                Route(store, self._store_get, methods=["GET"]),
                Route(store, self._store_set, methods=["PUT"]),
                Route(store, self._store_change, methods=["POST"]),
                Route(store, self._store_delete, methods=["DELETE"]),
                Route("/model", self._model, methods=["GET"]),
                Route("/model/ranges", self._model_ranges, methods=["POST"]),
            ],
            exception_handlers={Refused: _refused, HTTPException: _unknown, Exception: _failed},
        )

    async def _join(self, request: Request) -> Response:
        secret = _bearer(request)
        joining = await _parsed(request, Joining)
        return JSONResponse({"token": self.roster.join(secret, joining.attempt, joining.member)})

    async def _next(self, request: Request) -> Response:
        seat = self._seat(request)
        wait_s = min(POLL_S, self.roster.silent_s / 3)
        found = await self.roster.instruction(seat, _number(request, "after"), wait_s)
        return Response(status_code=204) if found is None else JSONResponse({"number": found[0], "do": found[1]})

    async def _events(self, request: Request) -> Response:
        seat = self._seat(request)
        told = await _parsed(request, Events)
        self.roster.hear(seat, told.stream, told.first, told.events)
        return Response(status_code=204)

    async def _leave(self, request: Request) -> Response:
        seat = self._seat(request)
        leaving = await _parsed(request, Leaving)
        if not seat.gone:
            self.roster.leave(seat, leaving.message)
        return Response(status_code=204)

    async def _store_get(self, request: Request) -> Response:
        self._admit(request)
        wait_s = min(STORE_WAIT_S, _number(request, "wait_ms") / 1000)
        value = await self.values.get(*_place(request), wait_s)
        if value is None:
            raise Refused(404, f"The store has no {request.path_params['key']}.")
        return Response(value, media_type="application/octet-stream")

    async def _store_set(self, request: Request) -> Response:
        self._admit(request)
        self.values.set(*_place(request), await _body(request))
        return Response(status_code=204)

    async def _store_change(self, request: Request) -> Response:
        self._admit(request)
        change = await _parsed(request, Change)
        if change.add is not None:
            return JSONResponse({"total": self.values.add(*_place(request), change.add, change.request)})
        try:
            expected = base64.b64decode(change.expected or "", validate=True)
            desired = base64.b64decode(change.desired or "", validate=True)
        except (ValueError, binascii.Error):
            raise Refused(400, "Values to compare are sent in base64.") from None
        value = self.values.compare_set(*_place(request), expected, desired, change.request)
        return Response(value, media_type="application/octet-stream")

    async def _store_delete(self, request: Request) -> Response:
        self._admit(request)
        return JSONResponse({"deleted": self.values.delete(*_place(request))})

    async def _model(self, request: Request) -> Response:
        self._admit(request)
        listing = await run_in_threadpool(self._files().listing)
        return JSONResponse([file._asdict() for file in listing])

    async def _model_ranges(self, request: Request) -> Response:
        self._admit(request)
        files = self._files()
        wanted = await _parsed(request, FileRanges)
        ranges = [(offset, length) for offset, length in wanted.ranges]
        try:
            size = await run_in_threadpool(files.check, wanted.file, ranges)
        except BadInput as error:
            raise Refused(404, str(error)) from None
        return StreamingResponse(
            files.read(wanted.file, ranges),
            headers={"Content-Length": str(size)},
            media_type="application/octet-stream",
        )

    def _seat(self, request: Request) -> Seat:
        return self.roster.seat(_bearer(request))

    def _admit(self, request: Request) -> None:
        """Let members and the coordinator itself pass.

        Raises:
            Refused: anybody else.
        """
        token = _bearer(request)
        if not hmac.compare_digest(token.encode(), self.own_token.encode()):
            self.roster.seat(token)

    def _files(self) -> ModelFiles:
        if self.files is None:
            raise Refused(404, "This coordinator hands out no model: every device has its own.")
        return self.files


def _bearer(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Refused(401, "This is a potluck coordinator: join it with 'potluck join INVITE'.")
    return token


async def _body(request: Request) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > BODY_BYTES:
                raise Refused(413, f"A request may have {BODY_BYTES >> 20} MiB.")
    except ClientDisconnect:
        raise Refused(400, "The request was cut short.") from None
    return bytes(body)


async def _parsed(request: Request, kind: type[Checked]) -> Checked:
    body = await _body(request)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3])
        raise Refused(400, f"The request cannot be used: {faults}.") from None


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refused(400, f"{name} is no number.")
    return int(text)


def _place(request: Request) -> tuple[int, str]:
    return request.path_params["generation"], request.path_params["key"]


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return JSONResponse({"message": error.message}, status_code=error.status)


async def _unknown(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"message": "A potluck coordinator has nothing here."}, status_code=error.status_code)


async def _failed(request: Request, error: Exception) -> Response:
    logging.getLogger(__name__).error("The coordinator failed at %s.", request.url.path, exc_info=error)
    return JSONResponse({"message": f"The coordinator failed ({type(error).__name__})."}, status_code=500)
