"""What can go wrong, in sentences a person can act on.

The command line prints the message and leaves with ``exit_code``; a traceback is shown only with ``--debug``.
"""

_LONGEST_SAID = 4_000


class PotluckError(Exception):
    """Something failed while potluck ran: the message says what, where, and what to do."""

    exit_code = 1


class BadInput(PotluckError):
    """What the person gave cannot be used; nothing was written."""

    exit_code = 2


class DeviceLost(PotluckError):
    """A device of the pool ended before the training did."""


class SaveFailed(PotluckError):
    """The result could not be written; what stood there before is untouched."""

    exit_code = 2


def from_outside(said: object) -> str:
    """What another machine said, fit for a terminal: it may hold control sequences, and be of any length."""
    printable = (c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(said)[:_LONGEST_SAID])
    return "".join(printable)


def in_words(error: BaseException, who: str) -> str:
    """What is told to other devices when an error ended ``who``."""
    if isinstance(error, PotluckError):
        return str(error)
    if isinstance(error, KeyboardInterrupt | SystemExit):
        return f"{who} was interrupted."
    return f"{who} failed ({type(error).__name__})."
