"""The tables at both ends of a model: which they are, and how their rows are read."""

from torch import Tensor

from potluck.chain.embedding import Embedding
from potluck.chain.ranges import Ranges
from potluck.models.families.decoder import Decoder
from potluck.models.weights import Weights


def head_of(decoder: Decoder) -> str:
    """Name of the tensor whose rows the last hidden states are compared with."""
    names = decoder.names
    return f"{names.embedding if decoder.tied else names.head}.weight"


def embedding_tables(decoder: Decoder) -> tuple[str, ...]:
    """Names of the tensors that the first residual stream is made from."""
    names = decoder.names
    return tuple(f"{name}.weight" for name in (names.embedding, names.positions, names.types) if name is not None)


def tables(decoder: Decoder) -> tuple[str, ...]:
    """Those, and the head where it is a table of its own: single rows of them would tell token ids, or how many."""
    if decoder.sequence is not None:
        return embedding_tables(decoder)
    return tuple(dict.fromkeys((*embedding_tables(decoder), head_of(decoder))))


def embedding_of(weights: Weights, decoder: Decoder) -> Embedding:
    """Reads rows from ``weights`` as ids ask for them."""
    names, offset = decoder.names, decoder.position_offset

    def positions(S: int) -> Tensor:
        return weights.read(f"{names.positions}.weight", rows=Ranges.of(offset, offset + S))

    return Embedding(
        lambda ids: weights.rows(f"{names.embedding}.weight", ids),
        decoder.embedding_scale,
        None if names.positions is None else positions,
        None if names.types is None else lambda: weights.read(f"{names.types}.weight"),
    )
