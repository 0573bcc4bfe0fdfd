"""The HTTP side of the front door: who may ask, and what each address answers."""

import base64
import binascii
import hmac
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from potluck.control.files import ModelFiles
from potluck.control.members import Member, Roster, Seat
from potluck.control.model_responses import model_listing, model_ranges
from potluck.control.requests import Body, Refused, bearer, number, parsed, refusal_handlers, whole
from potluck.control.values import Values

STORE_WAIT_S = 10.0
POLL_S = 5.0
_TO_STRANGERS = "This is a potluck coordinator: join it with 'potluck join INVITE'."


class Joining(Body):
    """What a device sends to join."""

    attempt: Annotated[str, Field(min_length=16, max_length=64, pattern=r"^[\w-]+$")]
    member: Member


class Events(Body):
    """What a member tells, numbered from ``first`` within a stream of its own."""

    stream: Annotated[str, Field(min_length=1, max_length=64)]
    first: Annotated[int, Field(ge=1)]
    events: list[dict[str, Any]]


class Leaving(Body):
    """Why a member leaves."""

    message: Annotated[str, Field(max_length=10_000)]


class Change(Body):
    """An addition to a number in the store, or a comparison in base64."""

    request: Annotated[str, Field(min_length=16, max_length=64)]
    add: int | None = None
    expected: str | None = None
    desired: str | None = None


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
            exception_handlers=refusal_handlers("coordinator"),
        )

    async def _join(self, request: Request) -> Response:
        secret = bearer(request, _TO_STRANGERS)
        joining = await parsed(request, Joining)
        return JSONResponse({"token": self.roster.join(secret, joining.attempt, joining.member)})

    async def _next(self, request: Request) -> Response:
        seat = self._seat(request)
        wait_s = min(POLL_S, self.roster.silent_s / 3)
        found = await self.roster.instruction(seat, number(request, "after"), wait_s)
        return Response(status_code=204) if found is None else JSONResponse({"number": found[0], "do": found[1]})

    async def _events(self, request: Request) -> Response:
        seat = self._seat(request)
        told = await parsed(request, Events)
        self.roster.hear(seat, told.stream, told.first, told.events)
        return Response(status_code=204)

    async def _leave(self, request: Request) -> Response:
        seat = self._seat(request)
        leaving = await parsed(request, Leaving)
        if not seat.gone:
            self.roster.leave(seat, leaving.message)
        return Response(status_code=204)

    async def _store_get(self, request: Request) -> Response:
        self._admit(request)
        wait_s = min(STORE_WAIT_S, number(request, "wait_ms") / 1000)
        value = await self.values.get(*_place(request), wait_s)
        if value is None:
            raise Refused(404, f"The store has no {request.path_params['key']}.")
        return Response(value, media_type="application/octet-stream")

    async def _store_set(self, request: Request) -> Response:
        self._admit(request)
        self.values.set(*_place(request), await whole(request))
        return Response(status_code=204)

    async def _store_change(self, request: Request) -> Response:
        self._admit(request)
        change = await parsed(request, Change)
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
        return await model_listing(self._files())

    async def _model_ranges(self, request: Request) -> Response:
        self._admit(request)
        return await model_ranges(self._files(), request)

    def _seat(self, request: Request) -> Seat:
        return self.roster.seat(bearer(request, _TO_STRANGERS))

    def _admit(self, request: Request) -> None:
        """Let members and the coordinator itself pass.

        Raises:
            Refused: anybody else.
        """
        token = bearer(request, _TO_STRANGERS)
        if not hmac.compare_digest(token.encode(), self.own_token.encode()):
            self.roster.seat(token)

    def _files(self) -> ModelFiles:
        if self.files is None:
            raise Refused(404, "This coordinator hands out no model: every device has its own.")
        return self.files


def _place(request: Request) -> tuple[int, str]:
    return request.path_params["generation"], request.path_params["key"]
