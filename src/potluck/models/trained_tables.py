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
    names, padding = decoder.names, decoder.padding
    summed = decoder.embedding_is_head and len(shares) > 1

    def whole(name: str | None) -> Table | None:
        return None if name is None else cutter.table(name, _first_has_all(cutter, name, len(shares)))

    if summed:
        tokens = cutter.table(names.embedding, tuple(share.vocab_rows for share in shares))
    else:
        tokens = cutter.table(names.embedding, _first_has_all(cutter, names.embedding, len(shares)))
    return TrainedEmbedding(
        tokens,
        decoder.embedding_scale,
        whole(names.positions),
        whole(names.types),
        decoder.position_offset,
        None if padding is None else padding % decoder.vocab_size,
        summed,
    )


def trained_head(cutter: Cutter, decoder: Decoder, tokens: Table | None) -> TrainedHead:
    """The head that is the token table; a last stage without ``tokens`` has a copy of the first one's."""
    name = decoder.names.embedding
    return TrainedHead(tokens or cutter.table(name, _first_has_all(cutter, name, 1)), decoder.logit_softcap)


def _first_has_all(cutter: Cutter, name: str, world_size: int) -> tuple[Ranges, ...]:
    rows, *_ = cutter.checkpoint.shape(f"{name}.weight")
    return (Ranges.of(0, rows), *(Ranges(()),) * (world_size - 1))
