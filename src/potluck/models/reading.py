"""How a model of a family reads texts that it classifies."""

from potluck.models.families.decoder import Decoder
from potluck.texts.encode_labelled import Reads


def reads_of(decoder: Decoder) -> Reads:
    """Which token the classifier of transformers reads: an encoder's first, a decoder's last."""
    return "first" if decoder.bidirectional else "last"


def tells_texts_apart(decoder: Decoder) -> bool:
    """Whether the model has embeddings by which it tells the second text of a pair from the first."""
    return decoder.segments > 1
