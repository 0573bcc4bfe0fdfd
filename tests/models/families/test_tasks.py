"""Which family can do which task."""

import pytest
from transformers import BertConfig, GraniteConfig, LlamaConfig, RobertaConfig

from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import FAMILIES, decoder_for, decoder_of
from potluck.models.families.listing import families


def job(task: str, labels: list[str] | None = None) -> Job:
    data = {"train": "d", **({"labels": labels} if labels else {})}
    return Job.model_validate({"model": "m", "data": data, "output": "o", "task": task})


def test_an_encoder_says_no_tokens() -> None:
    with pytest.raises(BadInput, match=r"encoder.*set task: sequence-classification"):
        decoder_for(BertConfig(), job("causal-lm"))


def test_a_family_without_a_classifier_in_transformers() -> None:
    with pytest.raises(BadInput, match="no classification head"):
        decoder_for(GraniteConfig(), job("sequence-regression"))
    assert decoder_for(GraniteConfig(), job("causal-lm")).sequence is None


@pytest.mark.parametrize("config", [LlamaConfig(), BertConfig(), RobertaConfig()], ids=lambda c: c.model_type)
def test_a_head_has_as_many_outputs_as_there_are_classes(config: LlamaConfig) -> None:
    of_classes = decoder_for(config, job("sequence-classification", ["a", "b", "c"]))
    of_values = decoder_for(config, job("sequence-regression"))
    assert of_classes.sequence is not None
    assert of_values.sequence is not None
    assert (of_classes.sequence.kind, of_classes.sequence.size) == ("classes", 3)
    assert (of_values.sequence.kind, of_values.sequence.size) == ("value", 1)
    assert of_classes.head_rows == of_values.head_rows == 0
    assert of_classes.vocab_size == config.vocab_size


def test_positions_of_roberta_begin_behind_the_padding_id() -> None:
    model = decoder_of(RobertaConfig(max_position_embeddings=514, pad_token_id=1))
    assert (model.position_offset, model.max_positions) == (2, 512)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [({"is_decoder": True}, "built as a decoder"), ({"position_embedding_type": "relative_key"}, "relative_key")],
)
def test_encoders_that_are_none(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        decoder_of(BertConfig(**fields))


def test_the_listing_tells_tasks() -> None:
    listed = {each.model_type: each for each in families()}
    assert set(listed) == set(FAMILIES)
    sequence = ("sequence-classification", "sequence-regression")
    assert listed["bert"].tasks == listed["roberta"].tasks == sequence
    assert listed["bert"].schemes == ()
    assert listed["llama"].tasks == ("causal-lm", *sequence)
    assert listed["granite"].tasks == ("causal-lm",)
