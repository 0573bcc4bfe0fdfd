"""RoBERTa: BERT with one segment, positions that begin behind the padding id, and a head of two layers."""

from typing import TYPE_CHECKING

from potluck.models.families.bert import encoder, encoder_names
from potluck.models.families.decoder import ClassifierNames, Decoder

if TYPE_CHECKING:
    from transformers import RobertaConfig

_NAMES = encoder_names("roberta", ClassifierNames("classifier.out_proj", biased=True, hidden="classifier.dense"))


def roberta(config: "RobertaConfig") -> Decoder:
    """How a RoBERTa config is walked.

    Raises:
        BadInput: it is built as a decoder, or has relative positions.
    """
    return encoder(config, _NAMES, first_position=(config.pad_token_id or 0) + 1)
