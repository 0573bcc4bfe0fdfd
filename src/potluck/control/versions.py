"""What must be the same on every device, since different versions may compute different things."""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

_COMPARED = ("potluck", "torch", "transformers")


def versions() -> dict[str, str]:
    """Installed versions of potluck, torch and transformers, none of them imported."""
    return {name: _installed(name) for name in _COMPARED}


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """A sentence for the device that wants to join, or None where both can work together.

    Build labels, such as ``+cpu``, may differ.

    Args:
        mine: the coordinator's.
        theirs: the joining device's.
    """
    differing = [
        f"{name} {theirs.get(name, 'missing')} instead of {mine[name]}"
        for name in _COMPARED
        if _public(theirs.get(name, "missing")) != _public(mine[name])
    ]
    if not differing:
        return None
    return f"This device has {', '.join(differing)}: install the coordinator's version."


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def _public(full: str) -> str:
    return full.partition("+")[0]
