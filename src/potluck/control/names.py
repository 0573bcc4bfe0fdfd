"""What devices and clients are called."""

import re
import socket
from typing import Annotated

from pydantic import Field

from potluck.errors import BadInput

_PATTERN = r"^[\w.-]([\w .()-]*[\w.()-])?$"
_LONGEST = 64

Name = Annotated[str, Field(min_length=1, max_length=_LONGEST, pattern=_PATTERN)]


def host_name() -> str:
    """This machine's name, without its domain."""
    return socket.gethostname().partition(".")[0] or "device"


def check_name(name: str) -> None:
    """See that a device can be called so.

    Raises:
        BadInput: it cannot.
    """
    if not (len(name) <= _LONGEST and re.fullmatch(_PATTERN, name)):
        raise BadInput(
            f"--name {name!r}: a device's name has at most 64 letters, digits, '.', '_', '-', and spaces or"
            " parentheses within."
        )
