"""What the ranks of torch's pipelining and the test that starts them have in common."""

from pool.tiny import batch
from potluck.texts.batch import Batch

BLOCKS = [range(1), range(1, 3), range(3, 4)]


def batches() -> list[Batch]:
    """Micro-batches of one shape, as torch wants them, with unequal numbers of targets."""
    return [batch((8, 5), 40 + i) for i in range(5)]
