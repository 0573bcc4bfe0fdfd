"""BERT: an encoder whose stream is normed behind each sum, with learned positions and two segments."""

from typing import TYPE_CHECKING

from potluck.errors import BadInput
from potluck.models.families.decoder import ClassifierNames, Decoder, Layer, Names, decoder, one_key_a_query

if TYPE_CHECKING:
    from transformers import BertConfig, PretrainedConfig


def encoder_names(model: str, classifier: ClassifierNames) -> Names:
    """What BERT and the models built like it call their tensors; ``model`` is what all names begin with."""
    return Names(
        blocks=f"{model}.encoder.layer",
        embedding=f"{model}.embeddings.word_embeddings",
        positions=f"{model}.embeddings.position_embeddings",
        types=f"{model}.embeddings.token_type_embeddings",
        embedding_norm=f"{model}.embeddings.LayerNorm",
        last_norm=None,
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        o="attention.output.dense",
        into=("intermediate.dense",),
        out="output.dense",
        before_attention=None,
        before_mlp=None,
        stream_after_attention="attention.output.LayerNorm",
        stream_after_mlp="output.LayerNorm",
        classifier=classifier,
    )


_NAMES = encoder_names(
    "bert", ClassifierNames("classifier", biased=True, hidden="bert.pooler.dense", hidden_of_base=True)
)


def bert(config: "BertConfig") -> Decoder:
    """How a BERT config is walked.

    Raises:
        BadInput: it is built as a decoder, or has relative positions.
    """
    return encoder(config, _NAMES)


def encoder(config: "PretrainedConfig", names: Names, *, first_position: int = 0) -> Decoder:
    """An encoder read from BERT's fields.

    Raises:
        BadInput: it is built as a decoder, or has relative positions.
    """
    if config.is_decoder or config.add_cross_attention:
        raise BadInput("This model is an encoder built as a decoder (is_decoder, add_cross_attention): not supported.")
    if (positions := getattr(config, "position_embedding_type", "absolute")) != "absolute":
        raise BadInput(f"This model has position_embedding_type '{positions}'; only absolute ones are supported.")
    return decoder(
        config,
        (Layer(None),) * config.num_hidden_layers,
        biased=(*names.qkv, names.o, *names.into, names.out),
        names=names,
        norm="layer",
        norm_eps=config.layer_norm_eps,
        **one_key_a_query(config),
        gated=False,
        bidirectional=True,
        tied=True,
        segments=config.type_vocab_size,
        position_offset=first_position,
        max_positions=config.max_position_embeddings - first_position,
    )
