"""Answers that hand out a model: which files there are, and bytes of them."""

from typing import Annotated

from pydantic import Field
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from potluck.control.files import ModelFiles
from potluck.control.requests import Body, Refused, parsed
from potluck.errors import BadInput


class FileRanges(Body):
    """Pairs of offset and length in one file."""

    file: str
    ranges: list[Annotated[list[int], Field(min_length=2, max_length=2)]]


async def model_listing(files: ModelFiles) -> Response:
    """Name, size and digest of each file."""
    listing = await run_in_threadpool(files.listing)
    return JSONResponse([file._asdict() for file in listing])


async def model_ranges(files: ModelFiles, request: Request) -> Response:
    """The bytes that a request (:class:`FileRanges`) asks for, joined.

    Raises:
        Refused: there are no such bytes.
    """
    wanted = await parsed(request, FileRanges)
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
