"""How a run tells those who watch it what goes on."""

from collections.abc import Sequence

from potluck.pool.candidates import Candidate
from potluck.pool.launch import Event
from potluck.pool.plan import Plan
from potluck.pool.result import Evaluated


class Listener:
    """Told how a run goes; override what you want to hear."""

    def tell(self, text: str) -> None:
        """A sentence about what is being done now."""

    def invited(self, invite: str, peers: int, minutes: float) -> None:
        """``peers`` other machines are waited for; each joins with ``potluck join INVITE``."""

    def chosen(self, candidates: Sequence[Candidate], chosen: Candidate, if_data_moved: str | None) -> None:
        """The plans that measurements allow, the one that was chosen, and what would be faster if data could move."""

    def planned(self, plan: Plan) -> None:
        """Who holds what."""

    def scoring(self, when: str, done: int, total: int) -> None:
        """``done`` of ``total`` held-out examples are scored; ``when`` is ``before`` or ``after``."""

    def scored(self, when: str, scores: Evaluated) -> None:
        """The scores ``before`` or ``after`` training."""

    def event(self, event: Event) -> None:
        """An event of a device.

        ``data`` (an owner's examples), ``loaded``, ``fetched``, ``begin``, ``step``, ``ran_out`` (an owner's examples,
        for this epoch), ``saving``, ``saved`` or ``finished``.
        """
