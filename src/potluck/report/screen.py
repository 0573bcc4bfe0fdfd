"""Where a run is shown: sentences, and on a terminal a bar with a line of detail under it."""

from types import TracebackType
from typing import Self

import rich.live
from rich.console import Console, Group
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text


class Screen:
    """A console with at most one bar; used as a context manager, so that the bar ends with the run."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._detail = Text()
        self._screen = rich.live.Live(
            console=console, get_renderable=lambda: Group(self._bar, self._detail), transient=True
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self._screen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._screen.stop()

    def tell(self, text: str) -> None:
        """Show a sentence."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, what: str, done: int, total: int, detail: str = "") -> None:
        """Move the bar of ``what``, which takes the place of another one."""
        if self._task is None or self._bar.tasks[0].description != what:
            self.finish()
            self._task = self._bar.add_task(what, total=total)
        self._bar.update(self._task, completed=done, total=total)
        self._detail.plain = detail

    def finish(self) -> None:
        """Take the bar away."""
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        self._detail.plain = ""
