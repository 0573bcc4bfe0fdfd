"""What a machine that joined a pool shows of its part."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.status import Status

_LINE_EVERY_S = 5.0


class GuestView:
    """Sentences about a device that works for another machine; a spinner on a terminal while nothing is said."""

    def __init__(self, console: Console, *, data_may_leave: bool = False) -> None:
        self._console = console
        self._where = "" if data_may_leave else "; they stay here"
        self._status = Status("Waiting", console=console)
        self._line_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def tell(self, text: str) -> None:
        """Show a sentence."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def event(self, event: dict[str, Any]) -> None:
        """Show an event of the device that runs here."""
        kind = event["event"]
        if kind == "profile":
            self.tell("Measured this device.")
            self._status.update("Waiting for the plan")
        elif kind == "data":
            self.tell(f"{event['examples']:,} examples of this device take part{self._where}.")
        elif kind == "fetching":
            self._fetching(event["done"], event["total"])
        elif kind == "loaded":
            self.tell(f"Holding {event['weights_mib']:,.0f} MiB of the model. Training.")
            self._status.update("Training")
        elif kind == "fetched" and event["bytes"]:
            self.tell(f"In all, {event['bytes'] / 2**20:,.1f} MiB of the model were fetched.")

    def _fetching(self, done: int, total: int) -> None:
        text = f"Fetching the model: {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB"
        self._status.update(text)
        if not self._console.is_terminal and time.monotonic() - self._line_s > _LINE_EVERY_S:
            self._line_s = time.monotonic()
            self.tell(text)
