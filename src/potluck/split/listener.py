"""Who wants to know how split training goes on."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what judges is the server's
    from potluck.split.quality import Quality


class SplitListener:
    """Told what happens; this one does nothing with it."""

    def tell(self, text: str) -> None:
        """A sentence for a person."""

    def invited(self, invite: str, scheme: str) -> None:
        """Clients may come."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Something long is at ``done`` of ``total``; 0 of 0 ends it."""

    def step(self, step: int, steps: int, loss: float, step_s: float) -> None:
        """A step of training was taken."""

    def judged(self, when: str, quality: "Mapping[str, Quality]") -> None:
        """Quality of each client's held-out examples, ``before`` or ``after`` training."""
