"""Who has joined: places, names, tokens, what each member is to do and what it told. Lives in one event loop."""

import asyncio
import hashlib
import hmac
import queue
import secrets
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass

from potluck.control.names import Name
from potluck.control.requests import Refused
from potluck.control.versions import differences, versions

Arrivals = queue.Queue[tuple[str, dict[str, Any] | None]]

_STREAMS = 16
_WAITING_INSTRUCTIONS = 10_000


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Member:
    """A device as it described itself when it joined."""

    name: Name
    address: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[0-9a-fA-F.:]+$")]
    """Where its messages leave towards the coordinator."""
    versions: Annotated[dict[str, str], Field(max_length=16)]
    has_data: bool
    threads: Annotated[int, Field(ge=1)]
    machine: dict[str, Any]


@dataclass(eq=False)
class Seat:
    """A member's place while it is here."""

    member: Member
    attempt: str
    """Drawn by the member for one joining: the same again is a retry."""
    token: str = field(repr=False)
    heard: float
    """When it last asked for an instruction or told something, by the monotonic clock."""
    outbox: deque[tuple[int, dict[str, Any]]] = field(default_factory=deque)
    """Numbered instructions the member has not acknowledged."""
    last_number: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    received: dict[str, int] = field(default_factory=dict)
    """The last event's number, by the stream it came in."""
    held_back: list[dict[str, Any]] = field(default_factory=list)
    """Events told before all places were taken."""
    told_end: bool = False
    gone: bool = False


class Roster:
    """All places of one pool; methods are called in the event loop only.

    Until all places are taken, who leaves makes room, and ``changes`` tells of both; from then on nobody new comes in,
    and ``arrivals`` tells what members say and that they left.
    """

    def __init__(
        self, *, secret: str, places: int, invite_s: float, taken_names: Collection[str], silent_s: float
    ) -> None:
        self.arrivals: Arrivals = queue.Queue()
        self.changes: queue.Queue[tuple[Member, str | None]] = queue.Queue()
        """Members as they join (None), or leave before all places are taken (the reason)."""
        self.silent_s = silent_s
        self._secret = secret.encode()
        self._places = places
        self._expires = time.monotonic() + invite_s
        self._taken_names = {name.casefold() for name in taken_names}
        self._seats: dict[bytes, Seat] = {}
        self._full = places == 0
        self._ended: str | None = None

    def join(self, secret: str, attempt: str, member: Member) -> str:
        """Give a place; the token that the member shows from now on.

        Raises:
            Refused: wrong secret, expired invite, other versions, a name that is taken, or no place left.
        """
        if not hmac.compare_digest(secret.encode(), self._secret):
            raise Refused(401, "The invite's secret is wrong: it belongs to another pool. Ask for a new invite.")
        for seat in self._seats.values():
            if seat.member == member and hmac.compare_digest(seat.attempt.encode(), attempt.encode()):
                return seat.token
        if self._ended is not None:
            raise Refused(410, self._ended)
        if time.monotonic() > self._expires:
            raise Refused(410, "The invite has expired: start 'potluck tune' again for a new one.")
        if difference := differences(versions(), member.versions):
            raise Refused(409, difference)
        names = self._taken_names | {seat.member.name.casefold() for seat in self._seats.values()}
        if member.name.casefold() in names:
            raise Refused(409, f"A device named {member.name} is in this pool already: take another name with --name.")
        if self._full:
            raise Refused(409, f"All {self._places} places of this pool are taken.")
        token = secrets.token_urlsafe(32)
        self._seats[_digest(token)] = Seat(member, attempt, token, time.monotonic())
        self.changes.put((member, None))
        if len(self._seats) == self._places:
            self._full = True
            for seat in self._seats.values():
                self._tell(seat, seat.held_back)
        return token

    def seat(self, token: str) -> Seat:
        """The place of who shows ``token``.

        Raises:
            Refused: nobody here has it.
        """
        found = self._seats.get(_digest(token))
        if found is None:
            raise Refused(401, self._ended or "The coordinator does not know this device, or no longer: join again.")
        return found

    async def instruction(self, seat: Seat, after: int, wait_s: float) -> tuple[int, dict[str, Any]] | None:
        """The first instruction numbered above ``after``, or None when there is none within ``wait_s``.

        Those up to ``after`` are acknowledged by it. Asking is the member's sign of life.

        Raises:
            Refused: the member has left.
        """
        seat.heard = time.monotonic()
        while seat.outbox and seat.outbox[0][0] <= after:
            seat.outbox.popleft()
        if not seat.outbox:
            seat.changed.clear()
            try:
                await asyncio.wait_for(seat.changed.wait(), wait_s)
            except TimeoutError:
                return None
        if seat.gone:
            raise Refused(401, "This device has left the pool.")
        if not seat.outbox:
            return None
        seat.told_end |= seat.outbox[0][1].get("do") == "end"
        return seat.outbox[0]

    def hear(self, seat: Seat, stream: str, first: int, events: list[dict[str, Any]]) -> None:
        """Take events numbered from ``first``; those that came before are dropped.

        Raises:
            Refused: events before these are missing, or the member uses too many streams.
        """
        seat.heard = time.monotonic()
        received = seat.received.get(stream, 0)
        if first > received + 1:
            raise Refused(400, f"Events {received + 1} to {first - 1} are missing.")
        if stream not in seat.received and len(seat.received) >= _STREAMS:
            raise Refused(400, f"A device may tell events in {_STREAMS} streams.")
        new = events[received + 1 - first :]
        seat.received[stream] = received + len(new)
        if self._full:
            self._tell(seat, new)
        else:
            seat.held_back += new

    def leave(self, seat: Seat, message: str) -> None:
        """The member leaves and says why."""
        if self._full:
            self._tell(seat, [{"event": "left", "message": message}])
        self._remove(seat, message)

    def remove_silent(self) -> None:
        """Give up the members that were not heard of for ``silent_s``."""
        now = time.monotonic()
        for seat in [seat for seat in self._seats.values() if now - seat.heard > self.silent_s]:
            self._remove(seat, f"was silent for {self.silent_s:g} s")

    def send(self, name: str, instruction: Mapping[str, Any]) -> None:
        """Leave an instruction for a member, if it is here."""
        for seat in [seat for seat in self._seats.values() if seat.member.name == name]:
            self._leave_for(seat, dict(instruction))

    def end(self, message: str) -> None:
        """Leave an end for every member; from now on nobody joins."""
        if self._ended is None:
            self._ended = message
            for seat in list(self._seats.values()):
                self._leave_for(seat, {"do": "end", "message": message})

    def all_told_end(self) -> bool:
        """Whether every member that is here has been handed its end."""
        return all(seat.told_end for seat in self._seats.values())

    def invite_expired(self) -> bool:
        """Whether the invite is of no use any more while places are left."""
        return not self._full and time.monotonic() > self._expires

    def wake(self) -> None:
        """Let all that wait for an instruction return."""
        for seat in self._seats.values():
            seat.changed.set()

    def _leave_for(self, seat: Seat, instruction: dict[str, Any]) -> None:
        if len(seat.outbox) >= _WAITING_INSTRUCTIONS:
            self._remove(seat, "does not fetch its instructions")
            return
        seat.last_number += 1
        seat.outbox.append((seat.last_number, instruction))
        seat.changed.set()

    def _tell(self, seat: Seat, events: list[dict[str, Any]]) -> None:
        for event in events:
            self.arrivals.put((seat.member.name, event))

    def _remove(self, seat: Seat, reason: str) -> None:
        del self._seats[_digest(seat.token)]
        seat.gone = True
        seat.changed.set()
        if self._full:
            self.arrivals.put((seat.member.name, None))
        else:
            self.changes.put((seat.member, reason))


def _digest(token: str) -> bytes:
    """Tokens are looked up by digest, so that the time a look-up takes says nothing about a token."""
    return hashlib.sha256(token.encode()).digest()
