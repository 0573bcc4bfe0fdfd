"""Tokens that a model does not have."""

import pytest

from potluck.errors import BadInput
from potluck.texts.batch import Example
from potluck.texts.vocabulary import check_vocabulary


def test_a_tokenizer_larger_than_the_model() -> None:
    fits = Example((1, 9), (False, True), "data.jsonl:1", 1, "a")
    check_vocabulary([fits], 10)
    beyond = Example((1, 10), (False, True), "data.jsonl:2", 1, "a")
    with pytest.raises(BadInput, match=r"larger than the model: data\.jsonl:2 has token id 10, .* ids 0 to 9"):
        check_vocabulary([fits, beyond], 10)
