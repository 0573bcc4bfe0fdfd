"""Which parts of a model a device will read, found out without reading them."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from potluck.chain.ranges import Ranges
from potluck.chain.share import Share
from potluck.job import Lora
from potluck.models.build import build_part, tables
from potluck.models.checkpoint import Checkpoint, Part
from potluck.models.families.decoder import Decoder


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
    decoder: Decoder,
    shares: Sequence[Share],
    rank: int,
    lora: Lora | None,
    *,
    owns: bool,
    progress: Callable[[int, int], None],
) -> None:
    """Have what a rank will read of a model that lies elsewhere, and for an owner its tables as a whole.

    Which single rows an owner reads would tell the ids of its texts, so they are all fetched.

    Args:
        checkpoint: opened with a ``need``.
        decoder: the model's description.
        shares: what every rank holds.
        rank: this device.
        lora: the adapters, or None for full fine-tuning.
        owns: whether this device has training data.
        progress: told bytes done and bytes in all.

    Raises:
        BadInput: a target matches nothing.
        SaveFailed: the disk is full.
    """
    listed = Listed(checkpoint)
    build_part(listed, decoder, shares, rank, compute=torch.float32, lora=lora, seed=0)
    whole: list[Part] = [(name, None, None) for name in tables(decoder)] if owns else []
    checkpoint.fetch([*whole, *listed.parts], progress)
