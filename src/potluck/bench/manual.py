"""The PostgreSQL manual as texts, fetched once from the Debian archive that this machine uses.

The package is unpacked into the user's cache and not installed; nothing of it is part of potluck.
"""

from pathlib import Path

from potluck.bench.fetch import fetched, run_tool
from potluck.bench.html import text_of
from potluck.errors import BadInput
from potluck.models.cache import user_cache

PACKAGE = "postgresql-doc-15"

_WHAT = f"The PostgreSQL manual ({PACKAGE})"
_PAGES = Path("usr/share/doc") / PACKAGE / "html"
_NOT_TOPICS = ("index.html", "bookindex.html", "legalnotice.html", "biblio.html")


def postgres_manual(cache: Path | None = None) -> dict[str, str]:
    """The manual's pages: the name of each without ``.html``, and its text.

    Args:
        cache: where the unpacked package is kept; the user's cache directory if left out.

    Raises:
        BadInput: it is not in the cache and cannot be fetched: no Debian, no network, or no such package.
    """
    kept = fetched((cache or user_cache() / "texts") / PACKAGE, _WHAT, _unpack)
    files = [file for file in sorted((kept / _PAGES).glob("*.html")) if file.name not in _NOT_TOPICS]
    if not files:
        raise BadInput(f"The PostgreSQL manual in {kept} has no pages; remove that directory to fetch it again.")
    return {file.stem: text_of(file.read_text(encoding="utf-8", errors="replace")) for file in files}


def _unpack(into: Path) -> Path:
    run_tool(["apt-get", "download", PACKAGE], into, _WHAT)
    (archive,) = into.glob("*.deb")
    run_tool(["dpkg-deb", "-x", archive.name, "unpacked"], into, _WHAT)
    return into / "unpacked"
