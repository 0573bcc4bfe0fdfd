"""What can go wrong, in sentences a person can act on.

The command line prints the message and leaves with ``exit_code``; a traceback is shown only with ``--debug``.
"""


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
