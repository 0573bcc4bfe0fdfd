"""What every server here does with requests: who asks, how large they may be, and refusals as one sentence."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

BODY_BYTES = 8 << 20

Checked = TypeVar("Checked", bound="Body")
Handlers = dict[Any, Callable[[Request, Exception], Awaitable[Response]]]


class Refused(Exception):
    """An answer other than success: an HTTP status and one sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Body(BaseModel):
    """A request's JSON: of the fields that are declared, and no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


def bearer(request: Request, to_strangers: str) -> str:
    """The token of who asks.

    Raises:
        Refused: none is shown; ``to_strangers`` says what is here.
    """
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Refused(401, to_strangers)
    return token


async def chunks(request: Request, limit: int = BODY_BYTES, what: str = "A request") -> AsyncIterator[bytes]:
    """A request's body as it comes.

    Raises:
        Refused: it has more than ``limit`` bytes, or ends before its end.
    """
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > limit:
                raise Refused(413, f"{what} may have {limit >> 20} MiB.")
            yield chunk
    except ClientDisconnect:
        raise Refused(400, f"{what} was cut short.") from None


async def whole(request: Request, limit: int = BODY_BYTES, what: str = "A request") -> bytes:
    """A request's body; raises as :func:`chunks` does."""
    body = bytearray()
    async for chunk in chunks(request, limit, what):
        body += chunk
    return bytes(body)


async def parsed(request: Request, kind: type[Checked]) -> Checked:
    """A request's JSON.

    Raises:
        Refused: it is not of this kind, or see :func:`chunks`.
    """
    body = await whole(request)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3])
        raise Refused(400, f"The request cannot be used: {faults}.") from None


def number(request: Request, name: str) -> int:
    """A number of the address's query, 0 where it is left out.

    Raises:
        Refused: it is no number.
    """
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise Refused(400, f"{name} is no number.")
    return int(text)


def refusal_handlers(who: str) -> Handlers:
    """An application's exception handlers: each answers JSON with a ``message``.

    Args:
        who: what the server is called in sentences, such as ``coordinator``.
    """

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        return JSONResponse({"message": error.message}, status_code=error.status)

    async def unknown(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return JSONResponse({"message": f"A potluck {who} has nothing here."}, status_code=error.status_code)

    async def failed(request: Request, error: Exception) -> Response:
        logging.getLogger(__name__).error("The %s failed at %s.", who, request.url.path, exc_info=error)
        return JSONResponse({"message": f"The {who} failed ({type(error).__name__})."}, status_code=500)

    return {Refused: refused, HTTPException: unknown, Exception: failed}
