"""What one device holds of every layer."""

from dataclasses import dataclass

from potluck.chain.ranges import Ranges


@dataclass(frozen=True)
class Share:
    """Units of one device, alike in every block; each may be empty."""

    heads: Ranges
    """Query heads; a key/value head is held wherever one of its query heads is."""
    columns: Ranges
    """MLP columns."""
    vocab_rows: Ranges
    """Rows of the head."""
