"""Which tokens a labelled example has, where it is read, and what its label has become."""

import copy
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_example import Tokenizers, contents, data

from bert_tokenizer import CLS, SEP, bert_tokenizer
from potluck.errors import BadInput
from potluck.texts.batch import Example
from potluck.texts.columns import Columns
from potluck.texts.encode_labelled import Reads, encode_labelled
from potluck.texts.labelled import Labelled

COLUMNS = Columns("text", None, "label")
BERT = bert_tokenizer([f"w{i}" for i in range(20)])


def row(text: str, pair: str | None = None, label: str | float = "a", where: str = "x.csv:2") -> Labelled:
    return Labelled(text, pair, label, where, COLUMNS)


def only(given: Labelled, reads: Reads = "first", *, types: bool = True, **named: object) -> Example:
    (example,) = encode_labelled(
        [given], BERT, data(**{"labels": ["a", "b"]} | named), reads=reads, types=types
    ).examples
    return example


def test_a_text_as_an_encoder_reads_it() -> None:
    ids = (CLS, 4, 5, SEP)
    assert only(row("w0 w1", label="b")) == Example(
        ids, (False,) * 4, "x.csv:2", prompt_length=4, answer=None, label=1, reads_at=0, types=None
    )
    assert only(row("w0 w1"), "last").reads_at == 3


def test_a_pair_has_types_where_the_model_knows_them() -> None:
    example = only(row("w0 w1", "w2"))
    assert example.ids == (CLS, 4, 5, SEP, 6, SEP)
    assert example.types == (0, 0, 0, 0, 1, 1)
    assert only(row("w0 w1", "w2"), types=False).types is None
    untyped = copy.deepcopy(BERT)
    untyped.model_input_names = ["input_ids", "attention_mask"]  # so stock transformers would give none
    settings = data(labels=["a", "b"])
    (example,) = encode_labelled([row("w0", "w2")], untyped, settings, reads="first", types=True).examples
    assert example.types is None


def test_classes_are_whole_and_values_are_not() -> None:
    assert isinstance(only(row("w0", label="b")).label, int)
    value = only(row("w0", label=2.0), labels=[]).label
    assert isinstance(value, float)
    assert value == 2.0


@given(first=st.integers(1, 12), second=st.integers(1, 12), max_length=st.integers(5, 20))
def test_the_longer_text_of_a_pair_is_cut_first(first: int, second: int, max_length: int) -> None:
    a, b = (" ".join(f"w{i}" for i in range(count)) for count in (first, second))
    encoded = encode_labelled(
        [row(a, b)], BERT, data(labels=["a", "b"], max_length=max_length), reads="last", types=True
    )
    (example,) = encoded.examples
    assert len(example.ids) == min(max_length, first + second + 3)
    assert encoded.cut == (first + second + 3 > max_length)
    assert (example.ids[0], example.ids[-1], example.ids.count(SEP)) == (CLS, SEP, 2)
    assert example.reads_at == len(example.ids) - 1
    kept = example.ids.index(SEP) - 1, len(example.ids) - example.ids.index(SEP) - 2
    assert list(example.ids[1 : 1 + kept[0]]) == [4 + i for i in range(kept[0])]
    for own, other, whole in ((*kept, first), (*kept[::-1], second)):
        if own < whole:
            assert own >= other - 1  # what was cut is not shorter than the other one


@pytest.mark.parametrize("kind", ["chatml", "llama3", "mistral"])
@given(texts=st.lists(contents.filter(str.strip), min_size=1, max_size=4))
def test_a_decoders_text_is_what_its_tokenizer_makes_of_it(kind: str, tokenizers: Tokenizers, texts: list[str]) -> None:
    tokenizer = tokenizers[kind]
    rows = [row(text, label=0.5, where=f"x:{i}") for i, text in enumerate(texts)]
    encoded = encode_labelled(rows, tokenizer, data(), reads="last", types=False)
    assert [list(example.ids) for example in encoded.examples] == [tokenizer(text)["input_ids"] for text in texts]
    assert all(e.reads_at == len(e.ids) - 1 and not any(e.supervised) for e in encoded.examples)
    assert (encoded.dropped, encoded.cut) == ([], 0)


def test_many_rows_keep_their_order() -> None:
    rows = [row(" ".join(["w1"] * (1 + i % 7)), label="ab"[i % 2], where=f"x:{i}") for i in range(2500)]
    encoded = encode_labelled(rows, BERT, data(labels=["a", "b"], max_length=6), reads="first", types=True)
    assert [example.where for example in encoded.examples] == [f"x:{i}" for i in range(2500)]
    assert [len(example.ids) for example in encoded.examples] == [min(6, 3 + i % 7) for i in range(2500)]
    assert [example.label for example in encoded.examples] == [i % 2 for i in range(2500)]
    assert encoded.cut == sum(3 + i % 7 > 6 for i in range(2500))


def test_a_label_that_training_does_not_know() -> None:
    with pytest.raises(BadInput) as caught:
        only(row("w0", label="c"))
    first, second = str(caught.value).splitlines()
    assert first.startswith("x.csv:2: the label of this row is none of the 2 classes of the training rows")
    assert "'c'" not in first
    assert second == "It is 'c'; the classes are 'a', 'b'."
    with pytest.raises(BadInput, match=re.escape("'19', ....")):
        only(row("w0", label="c"), labels=[str(i) for i in range(30)])


def test_no_room_and_no_tokens(tokenizers: Tokenizers) -> None:
    with pytest.raises(BadInput, match=r"data\.max_length 4 leaves no room for text: the tokenizer adds 3 tokens"):
        only(row("w0", "w1"), max_length=4)
    assert len(only(row("w0 w1 w2", "w1 w2"), max_length=5).ids) == 5
    with pytest.raises(BadInput, match="There is no row"):
        encode_labelled([], BERT, data(labels=["a", "b"]), reads="first", types=True)
    with pytest.raises(BadInput, match=r"x\.csv:2: the tokenizer makes no token"):
        encode_labelled([row("")], tokenizers["chatml"], data(labels=["a", "b"]), reads="last", types=True)
