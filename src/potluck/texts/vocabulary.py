"""Whether a model knows every token of the examples."""

from collections.abc import Sequence

from potluck.errors import BadInput
from potluck.texts.batch import Example


def check_vocabulary(examples: Sequence[Example], vocab_size: int) -> None:
    """Refuse token ids that a model with ``vocab_size`` embeddings does not have.

    Raises:
        BadInput: the tokenizer is larger than the model.
    """
    for example in examples:
        if max(example.ids) >= vocab_size:
            raise BadInput(
                f"The tokenizer is larger than the model: {example.where} has token id {max(example.ids)}, and the"
                f" model knows the ids 0 to {vocab_size - 1}. Use the tokenizer that belongs to the model."
            )
