"""Embedding tables that are trained, and who holds which rows of them.

The first rank, which always has data, holds the tables whole and looks up alone; other devices only list them. Where
the token table is the LM head too, its rows are shared as the head's are, and all devices look up together.
"""

from collections.abc import Sequence

from potluck.chain.ranges import Ranges
from potluck.chain.share import Share
from potluck.chain.trained_embedding import Table, TrainedEmbedding
from potluck.chain.trained_head import TrainedHead
from potluck.models.cutting import Cutter
from potluck.models.families.decoder import Decoder


def trained_embedding(cutter: Cutter, decoder: Decoder, shares: Sequence[Share]) -> TrainedEmbedding:
    """This rank's part of the tables.

    Args:
        cutter: without adapters.
        decoder: the model's description.
        shares: of all ranks; of one alone it is not looked at, as a stage of a pipeline has rows of no head.
    """
    names, world_size = decoder.names, len(shares)
    summed = decoder.embedding_is_head and world_size > 1
    if summed:
        tokens = cutter.table(names.embedding, tuple(share.vocab_rows for share in shares))
    else:
        tokens = _of_first(cutter, names.embedding, world_size)
    return TrainedEmbedding(
        tokens,
        decoder.embedding_scale,
        None if names.positions is None else _of_first(cutter, names.positions, world_size),
        None if names.types is None else _of_first(cutter, names.types, world_size),
        decoder.position_offset,
        decoder.padding,
        summed,
    )


def trained_head(cutter: Cutter, decoder: Decoder, tokens: Table | None) -> TrainedHead:
    """The head that is the token table; a last stage without ``tokens`` has a copy of the first one's."""
    return TrainedHead(tokens or _of_first(cutter, decoder.names.embedding, 1), decoder.logit_softcap)


def _of_first(cutter: Cutter, name: str, world_size: int) -> Table:
    """A table that the first rank has whole."""
    rows, *_ = cutter.checkpoint.shape(f"{name}.weight")
    return cutter.table(name, (Ranges.of(0, rows), *(Ranges(()),) * (world_size - 1)))
