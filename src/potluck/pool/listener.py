"""How a run tells those who watch it what goes on."""

from potluck.pool.launch import Event
from potluck.pool.plan import Plan
from potluck.pool.result import Evaluated


class Listener:
    """Told how a run goes; override what you want to hear."""

    def tell(self, text: str) -> None:
        """A sentence about what is being done now."""

    def planned(self, plan: Plan) -> None:
        """Who holds what."""

    def scoring(self, when: str, done: int, total: int) -> None:
        """``done`` of ``total`` held-out examples are scored; ``when`` is ``before`` or ``after``."""

    def scored(self, when: str, scores: Evaluated) -> None:
        """The scores ``before`` or ``after`` training."""

    def event(self, event: Event) -> None:
        """An event of a device: ``loaded``, ``data``, ``step``, ``saving``, ``saved`` or ``finished``."""
