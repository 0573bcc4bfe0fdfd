"""What a person writes for a testbed: speeds, a link's rate, memory sizes, names."""

import math
import re
from collections.abc import Sequence

from potluck.errors import BadInput

MOST_DEVICES = 250
LOAD_PER_CORE = 0.9
"""Part of a core that all devices together may compute on, so that none waits for another's turn."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit")
_RATE_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)(kib|mib|gib)")
_SIZE_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}
_LOWEST_RATE = 10**6
_SMALLEST_MEMORY = 16 << 20
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_PREFIX = re.compile(r"[a-z][a-z0-9]{0,15}")


def parse_speeds(text: str) -> list[float]:
    """``1.42:1:1`` as numbers.

    Raises:
        BadInput: a part is no number above 0, or there are too many.
    """
    try:
        ratios = [float(part) for part in text.split(":")]
    except ValueError:
        raise BadInput(f"--speeds: '{text}' is no list of ratios such as 1.42:1:1.") from None
    check_speeds(ratios)
    return ratios


def check_speeds(ratios: Sequence[float]) -> None:
    """Refuse what no device can be.

    Raises:
        BadInput: a ratio is not above 0 and finite, there is none, or there are too many.
    """
    if not 1 <= len(ratios) <= MOST_DEVICES:
        raise BadInput(f"--speeds: a testbed has 1 to {MOST_DEVICES} devices, not {len(ratios)}.")
    for ratio in ratios:
        if not 0 < ratio < math.inf:
            raise BadInput(f"--speeds: each ratio is a number above 0, not {ratio:g}.")


def check_load(load: float) -> None:
    """See that devices leave room for the messages between them.

    Raises:
        BadInput: they do not, or ``load`` is not above 0.
    """
    if not 0 < load <= LOAD_PER_CORE:
        raise BadInput(f"--load: {load:g} is not above 0 and at most {LOAD_PER_CORE}: messages need the rest.")


def scale_speeds(ratios: Sequence[float], cores: int, load: float = LOAD_PER_CORE) -> list[float]:
    """Speeds in proportion to ``ratios``, as parts of a core: at most 1 each and ``load * cores`` together.

    They are rounded down to 6 digits, so that the sum stays below its bound.
    """
    scale = min(load * cores / math.fsum(ratios), 1 / max(ratios))
    return [max(math.floor(ratio * scale * 1e6 + 1e-3), 1) / 1e6 for ratio in ratios]


def parse_rate(text: str) -> int:
    """``100mbit``, ``1gbit`` as bits a second.

    Raises:
        BadInput: it is no rate, or one below 1 Mbit/s.
    """
    match = _RATE.fullmatch(text.strip().lower())
    rate = round(float(match[1]) * _RATE_UNITS[match[2] or ""]) if match else 0
    if rate < _LOWEST_RATE:
        raise BadInput(f"--link: '{text}' is no rate of at least 1mbit; write it as 100mbit or 1gbit.")
    return rate


def parse_memory(text: str | None, devices: int) -> list[int | None]:
    """``4GiB`` for every device, or ``4GiB:2GiB:none`` for each, in bytes; None is no limit.

    Raises:
        BadInput: a part is no size of at least 16 MiB, or there are neither one nor as many as devices.
    """
    if text is None:
        return [None] * devices
    parts = [_parse_size(part.strip()) for part in text.split(":")]
    if len(parts) == 1:
        parts *= devices
    if len(parts) != devices:
        raise BadInput(f"--memory: {len(parts)} sizes for {devices} devices; give one for all, or one each.")
    return parts


def _parse_size(text: str) -> int | None:
    if text.lower() == "none":
        return None
    match = _SIZE.fullmatch(text.lower())
    size = round(float(match[1]) * _SIZE_UNITS[match[2]]) if match else 0
    if size < _SMALLEST_MEMORY:
        raise BadInput(f"--memory: '{text}' is no size of at least 16MiB; write it as 512MiB, 4GiB or none.")
    return size


def parse_names(text: str | None, devices: int) -> list[str]:
    """``hub:cam-1:cam-2`` as names; ``device-0``, ``device-1``, ... where none are given.

    Raises:
        BadInput: see :func:`check_names`.
    """
    names = [f"device-{rank}" for rank in range(devices)] if text is None else text.split(":")
    check_names(names, devices)
    return names


def check_names(names: Sequence[str], devices: int) -> None:
    """Refuse names that are not one each, twice the same, or no host names.

    Raises:
        BadInput: so they are.
    """
    if len(names) != devices:
        raise BadInput(f"--names: {len(names)} names for {devices} devices; give one each, as hub:cam-1:cam-2.")
    for name in names:
        if not _NAME.fullmatch(name):
            raise BadInput(f"--names: '{name}' is no host name: lower-case letters, digits and '-', at most 40.")
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadInput(f"--names: {', '.join(twice)} stands there twice; each device has a name of its own.")


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that could be taken for another testbed's, or is no file name.

    Raises:
        BadInput: so it is.
    """
    if not _PREFIX.fullmatch(prefix):
        raise BadInput(f"'{prefix}' is no prefix of a testbed: a lower-case letter, then up to 15 letters or digits.")
