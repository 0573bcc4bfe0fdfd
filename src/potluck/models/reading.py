"""How a model of a family reads texts that it classifies."""

from transformers import PretrainedConfig

from potluck.models.families import decoder_of
from potluck.texts.encode_labelled import Reads


def reads_of(config: PretrainedConfig) -> Reads:
    """Which token the classifier of transformers reads: an encoder's first, a decoder's last.

    Raises:
        BadInput: the family is not supported.
    """
    return "first" if decoder_of(config).bidirectional else "last"


def tells_texts_apart(config: PretrainedConfig) -> bool:
    """Whether the model has embeddings by which it tells the second text of a pair from the first.

    Raises:
        BadInput: the family is not supported.
    """
    return decoder_of(config).segments > 1
