"""The PostgreSQL manual as texts, fetched once from the Debian archive that this machine uses.

The package is unpacked into the user's cache and not installed; nothing of it is part of potluck.
"""

import secrets
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

from potluck.errors import BadInput
from potluck.models.cache import user_cache

PACKAGE = "postgresql-doc-15"

_PAGES = Path("usr/share/doc") / PACKAGE / "html"
_NOT_TOPICS = ("index.html", "bookindex.html", "legalnotice.html", "biblio.html")
_NAVIGATION = ("navheader", "navfooter")
_BLOCKS = frozenset(["p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "tr", "pre", "table", "div", "br"])
_SILENT = frozenset(["script", "style", "head"])
_VOID = frozenset(["br", "hr", "img", "meta", "link", "input", "col"])
_FETCH_S = 300


def postgres_manual(cache: Path | None = None) -> dict[str, str]:
    """The manual's pages: the name of each without ``.html``, and its text.

    Args:
        cache: where the unpacked package is kept; the user's cache directory if left out.

    Raises:
        BadInput: it is not in the cache and cannot be fetched: no Debian, no network, or no such package.
    """
    kept = (cache or user_cache() / "texts") / PACKAGE
    pages = kept / _PAGES
    if not pages.is_dir():
        _fetch(kept)
    files = [file for file in sorted(pages.glob("*.html")) if file.name not in _NOT_TOPICS]
    if not files:
        raise BadInput(f"The PostgreSQL manual in {kept} has no pages; remove that directory to fetch it again.")
    return {file.stem: text_of(file.read_text(encoding="utf-8", errors="replace")) for file in files}


def text_of(html: str) -> str:
    """What a page says, without its navigation; a line a block, and preformatted text as it is."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.text()


def _fetch(kept: Path) -> None:
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise BadInput(f"The PostgreSQL manual cannot be fetched: there is no {tool}, as Debian and Ubuntu have.")
    partial = kept.with_name(f".{kept.name}.{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        _run(["apt-get", "download", PACKAGE], partial)
        (archive,) = partial.glob("*.deb")
        _run(["dpkg-deb", "-x", archive.name, "unpacked"], partial)
        shutil.rmtree(kept, ignore_errors=True)
        (partial / "unpacked").rename(kept)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _run(command: Sequence[str], directory: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=directory, stdin=subprocess.DEVNULL, capture_output=True, timeout=_FETCH_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise BadInput(f"The PostgreSQL manual cannot be fetched: {command[0]} took over {_FETCH_S} s.") from None
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise BadInput(f"The PostgreSQL manual ({PACKAGE}) cannot be fetched: {reason}")


class _Reader(HTMLParser):
    """Collects the text of blocks; elements within a silent one are counted, so that its end is known."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._lines: list[str] = []
        self._line: list[str] = []
        self._silent = 0
        self._preformatted = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See the base class."""
        classes = (dict(attrs).get("class") or "").split()
        if self._silent or tag in _SILENT or any(name in classes for name in _NAVIGATION):
            self._silent += tag not in _VOID
            return
        if tag in _BLOCKS:
            self._end_line()
        self._preformatted += tag == "pre"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See the base class; ``<br />`` and ``<a id="x"/>`` have no end tag to wait for."""
        if tag in _BLOCKS and not self._silent:
            self._end_line()

    def handle_endtag(self, tag: str) -> None:
        """See the base class."""
        if self._silent:
            self._silent -= tag not in _VOID
            return
        if tag in _BLOCKS:
            self._end_line()
        self._preformatted -= tag == "pre"

    def handle_data(self, data: str) -> None:
        """See the base class."""
        if not self._silent:
            self._line.append(data)

    def text(self) -> str:
        """Everything so far."""
        self._end_line()
        return "\n".join(self._lines) + "\n" if self._lines else ""

    def _end_line(self) -> None:
        joined = "".join(self._line)
        line = joined.strip("\n") if self._preformatted else " ".join(joined.split())
        if line.strip():
            self._lines.append(line)
        self._line = []
