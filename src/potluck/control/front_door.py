"""The coordinator's side of a pool: a server whose event loop holds all state; called from other threads."""

import asyncio
import queue
import secrets
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from potluck.control.connection import Access
from potluck.control.files import ModelFiles
from potluck.control.identity import Identity
from potluck.control.invite import Invite
from potluck.control.members import Arrivals, Member, Roster
from potluck.control.routes import Routes
from potluck.control.server import HttpsServer
from potluck.control.values import Values
from potluck.errors import PotluckError

_SLICE_S = 0.2


class FrontDoor:
    """Serves from ``with`` to the end of its block, on one address and no other.

    ``arrivals`` holds ``(name, event)`` as members tell them, in order and once each; ``(name, None)`` comes once, as
    the last of a member that left, was silent for ``silent_s``, or did not fetch what it was to do. A member that said
    why it leaves has ``{"event": "left", "message": ...}`` before that. Nothing arrives before all places are taken.
    """

    def __init__(
        self,
        identity: Identity,
        address: str,
        *,
        port: int = 0,
        places: int,
        invite_s: float,
        taken_names: Collection[str] = (),
        files: ModelFiles | None = None,
        silent_s: float = 20.0,
        grace_s: float = 3.0,
    ) -> None:
        """Bind the address; nobody is answered before ``with``.

        Args:
            identity: whose certificate is shown.
            address: numeric, of this machine.
            port: 0 takes a free one.
            places: how many members can join.
            invite_s: seconds from now for which the invite holds.
            taken_names: of devices that are in the pool without joining.
            files: handed out to members; None if none are.
            silent_s: seconds without a sign of life after which a member counts as gone.
            grace_s: seconds for which the end of the block waits until members have fetched that it is the end.

        Raises:
            BadInput: the address or port cannot be listened on.
        """
        secret, own_token = secrets.token_urlsafe(16), secrets.token_urlsafe(32)
        self._values = Values()
        self._roster = Roster(
            secret=secret, places=places, invite_s=invite_s, taken_names=taken_names, silent_s=silent_s
        )
        self._places = places
        self._grace_s = grace_s
        self.arrivals: Arrivals = self._roster.arrivals
        app = Routes(self._roster, self._values, files, own_token).app()
        self._server = HttpsServer(identity, address, port, app, beside=self._watch, on_stop=self._let_go)
        self.invite = Invite(address, self._server.port, identity.fingerprint, secret)
        self.access = Access.by_invite(self.invite, own_token)

    def __enter__(self) -> Self:
        self._server.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._server.serves:
                self.end("The coordinator has ended the training.")
                deadline = time.monotonic() + self._grace_s
                while time.monotonic() < deadline and not self._server.call(self._roster.all_told_end):
                    time.sleep(0.02)
        finally:
            self._server.__exit__(kind, error, trace)

    def wait_for_members(
        self, on_join: Callable[[Member], None], on_leave: Callable[[str, str], None] | None = None
    ) -> list[Member]:
        """Block until all places are taken; the members in the order of joining.

        Args:
            on_join: called in this thread with each member as it joins.
            on_leave: called with name and reason where one leaves again before that; its place is free again.

        Raises:
            PotluckError: the invite expired before all had come.
        """
        members: list[Member] = []
        while len(members) < self._places:
            try:
                # in slices: a blocking get without a timeout would not be interrupted by Ctrl-C everywhere
                member, left = self._roster.changes.get(timeout=_SLICE_S)
            except queue.Empty:
                if self._server.call(self._roster.invite_expired) and self._roster.changes.empty():
                    raise PotluckError(
                        f"The invite expired when {len(members)} of {self._places} devices had joined: start again, "
                        "and use the new invite."
                    ) from None
                continue
            if left is None:
                members.append(member)
                on_join(member)
            else:
                members.remove(member)
                if on_leave is not None:
                    on_leave(member.name, left)
        return members

    def send(self, name: str, instruction: dict[str, Any]) -> None:
        """Leave an instruction for a member, which fetches them in order.

        What is left for one that is gone is dropped: ``arrivals`` tells that it is gone.
        """
        self._server.call(lambda: self._roster.send(name, instruction))

    def new_generation(self) -> int:
        """Begin the next generation, whose store is empty; its number, from 1."""
        return self._server.call(self._values.begin)

    def end(self, message: str) -> None:
        """Tell every member to end, and why; only the first call counts."""
        self._server.call(lambda: self._roster.end(message))

    def _let_go(self) -> None:
        self._roster.wake()
        self._values.begin()  # refuses who waits for a key

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._roster.silent_s / 4))
            self._roster.remove_silent()
