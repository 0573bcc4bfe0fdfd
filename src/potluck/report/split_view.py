"""Split training as people see it: sentences, a bar or now and then a plain line, and quality as a table."""

import time
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from potluck.report.screen import Screen
from potluck.split.listener import SplitListener
from potluck.split.quality import OVERALL, Quality

_LINE_EVERY_S = 5.0
_LINE_EVERY_PART = 0.1


class SplitView(Screen, SplitListener):
    """A listener that shows what happens on a console."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._what = ""
        self._line_s, self._line_done = time.monotonic(), 0

    def invited(self, invite: str, scheme: str) -> None:
        """Show what clients run."""
        stay = "uploads once and leaves" if scheme == "one-shot" else "stays connected until training ends"
        self.tell(f"Serving ({scheme}: a client {stay}). On each client:")
        self.tell(f"\n  potluck contribute {invite} DATA\n")

    def progress(self, what: str, done: int, total: int) -> None:
        """Move a bar."""
        self._moved(what, done, total, "")

    def step(self, step: int, steps: int, loss: float, step_s: float) -> None:
        """Move the bar of training."""
        self._moved("Training, steps", step, steps, f"loss {loss:.3f}  {step_s:.2f} s a step")

    def judged(self, when: str, quality: Mapping[str, Quality]) -> None:
        """Show the overall quality."""
        q = quality[OVERALL]
        self.tell(f"Held-out examples {when} training: loss {q.loss:.4f}, {q.accuracy:.0%} answered exactly.")

    def _moved(self, what: str, done: int, total: int, detail: str) -> None:
        """The bar, and where no bar is seen a line now and then."""
        if what != self._what:
            self._what, self._line_s, self._line_done = what, time.monotonic(), 0
        self.show(what, done, total, detail)
        if done >= total:
            self.finish()
        now, moved = time.monotonic(), done - self._line_done >= _LINE_EVERY_PART * total or done >= total
        if not self.console.is_terminal and now - self._line_s >= _LINE_EVERY_S and moved:
            self._line_s, self._line_done = now, done
            self.tell(f"{what}: {done:,} of {total:,}  {detail}".rstrip())


def quality_table(before: Mapping[str, Quality], after: Mapping[str, Quality]) -> Table:
    """Each client's quality, and that over all, before and after."""
    table = Table(title="Held-out examples, before and after", title_justify="left")
    table.add_column("client", overflow="fold")
    for column in ("examples", "loss", "perplexity", "answered exactly"):
        table.add_column(column, justify="right", no_wrap=True)
    names = [name for name in after if name != OVERALL]
    for name in [*sorted(names), OVERALL] if len(names) > 1 else [OVERALL]:
        was, now = before.get(name), after[name]
        if was is None:
            continue
        table.add_row(
            name,
            f"{now.examples:,}",
            f"{was.loss:.2f} > {now.loss:.3f}",
            f"{_short(was.perplexity)} > {now.perplexity:,.2f}",
            f"{was.accuracy:.0%} > {now.accuracy:.0%}",
        )
    return table


def _short(number: float) -> str:
    return f"{number:,.1f}" if number < 1e6 else f"{number:.0e}"
