"""Where fetched and converted files are kept."""

import os
from pathlib import Path


def user_cache() -> Path:
    """The user's cache directory for potluck (XDG base directories)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "potluck"
