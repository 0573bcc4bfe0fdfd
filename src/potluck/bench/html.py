"""What a page of HTML says."""

from html.parser import HTMLParser

_NAVIGATION = ("navheader", "navfooter")
_BLOCKS = frozenset(["p", "h1", "h2", "h3", "h4", "h5", "h6", "li", "dt", "dd", "tr", "pre", "table", "div", "br"])
_SILENT = frozenset(["script", "style", "head"])
_VOID = frozenset(["br", "hr", "img", "meta", "link", "input", "col"])


def text_of(html: str) -> str:
    """What a page says, without its navigation; a line a block, and preformatted text as it is."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    return reader.text()


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
