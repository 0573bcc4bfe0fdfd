"""Which parts of a model a device will read, found out without reading them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.chain.ranges import Ranges
from potluck.models.checkpoint import Checkpoint, Part
from potluck.models.weights import Weights


class Listed:
    """A checkpoint's names and shapes; notes what is read, and gives tensors without memory.

    Build a part from it, and ``parts`` is what the part reads.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.names = checkpoint.names
        self.parts: list[Part] = []

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._checkpoint.shape(name)

    def read(
        self,
        name: str,
        *,
        dtype: torch.dtype | None = None,
        rows: Ranges | None = None,
        columns: Ranges | None = None,
    ) -> Tensor:
        """A tensor of the right shape on the meta device."""
        self.parts.append((name, rows, columns))
        shape = list(self.shape(name))
        for dim, ranges in enumerate((rows, columns)):
            if ranges is not None:
                shape[dim] = len(ranges)
        return torch.empty(shape, dtype=dtype, device="meta")

    def rows(self, name: str, ids: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        """Never called."""
        raise AssertionError("rows are looked up by ids, which nobody has yet")


def prefetch(
    checkpoint: Checkpoint,
    build: Callable[[Weights], object],
    tables: Sequence[str],
    progress: Callable[[int, int], None],
) -> None:
    """Have what a device will read of a model that lies elsewhere.

    Which single rows of a table it reads would tell the token ids of texts, so such tables are fetched whole.

    Args:
        checkpoint: opened with a ``need``.
        build: makes what the device holds from what it reads.
        tables: names of tensors whose rows will be read by token ids.
        progress: told bytes done and bytes in all.

    Raises:
        SaveFailed: the disk is full.
    """
    listed = Listed(checkpoint)
    build(listed)
    whole: list[Part] = [(name, None, None) for name in tables]
    checkpoint.fetch([*whole, *listed.parts], progress)
