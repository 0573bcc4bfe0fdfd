"""Which tokens an example has, and which of them are targets."""

import copy

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from one_example import KINDS, USES_BOS, Tokenizers, chat, contents, data, decoded, only

from potluck.errors import BadInput
from potluck.job_sections import Format
from potluck.texts.batch import Example
from potluck.texts.encode import encode, encode_prompt
from potluck.texts.formats import Completion, Document, Instruction


@pytest.mark.parametrize("kind", ["chatml", "llama3", "mistral"])
@given(asked=contents, answer=contents, label=st.booleans())
def test_targets_of_a_completion(kind: str, tokenizers: Tokenizers, asked: str, answer: str, label: bool) -> None:
    tokenizer = tokenizers[kind]
    format: Format = "label" if label else "prompt"
    prompt = encode_prompt(asked, tokenizer, data(), format)
    assume(prompt)
    example = only(Completion(asked, answer, "x:1", format), tokenizer)
    assert list(example.ids[: example.prompt_length]) == prompt
    assert example.supervised == (False,) * len(prompt) + (True,) * (len(example.ids) - len(prompt))
    assert decoded(tokenizer, list(example.ids[len(prompt) :])).lstrip(" ") == answer.lstrip(" ")
    assert example.ids[-1] == tokenizer.eos_token_id
    if kind in USES_BOS:
        assert prompt[0] == tokenizer.bos_token_id
        assert example.ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("kind", KINDS)
@given(text=contents.filter(str.strip), max_length=st.integers(2, 40))
def test_each_token_of_a_document_is_a_target_once(
    kind: str, tokenizers: Tokenizers, text: str, max_length: int
) -> None:
    tokenizer = tokenizers[kind]
    body = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    encoded = encode([Document(text, "x.txt:1", "text")], tokenizer, data(max_length=max_length))
    assert encoded.cut == 0
    assert encoded.dropped == []
    learnt = [token for e in encoded.examples for token, on in zip(e.ids, e.supervised, strict=True) if on]
    assert learnt == (body if kind in USES_BOS else body[1:])
    for example in encoded.examples:
        assert len(example.ids) <= max_length
        assert example.supervised == (False, *[True] * (len(example.ids) - 1))
        assert example.answer is None
        if kind in USES_BOS:
            assert example.ids[0] == tokenizer.bos_token_id


@pytest.fixture(scope="module")
def otherwise_padded(tokenizers: Tokenizers) -> Tokenizers:
    copies = {kind: copy.deepcopy(tokenizers[kind]) for kind in ("chatml", "llama3", "gemma", "phi3")}
    for tokenizer in copies.values():
        tokenizer.pad_token_id = next(i for i in tokenizer.added_tokens_decoder if i != tokenizer.pad_token_id)
    return copies


@pytest.mark.parametrize("kind", ["chatml", "llama3", "gemma", "phi3"])
@given(turns=st.lists(contents, min_size=2, max_size=4), supervise=st.sampled_from(["answers", "all"]))
def test_masks_do_not_depend_on_the_padding_id(
    kind: str, tokenizers: Tokenizers, otherwise_padded: Tokenizers, turns: list[str], supervise: str
) -> None:
    one, other = tokenizers[kind], otherwise_padded[kind]
    assert one.pad_token_id != other.pad_token_id
    assert only(chat(*turns), one, supervise=supervise) == only(chat(*turns), other, supervise=supervise)


@given(turns=st.lists(contents, min_size=2, max_size=6), max_length=st.integers(2, 60))
def test_cutting_keeps_the_first_tokens_and_their_targets(
    tokenizers: Tokenizers, turns: list[str], max_length: int
) -> None:
    tokenizer = tokenizers["llama3"]
    rows = [chat(*turns), Completion("a", "b", "y:1", "prompt")]
    whole = only(rows[0], tokenizer)
    first_target = whole.supervised.index(True)
    if max_length >= 4:
        encoded = encode(rows, tokenizer, data(max_length=max_length))
        assert encoded.dropped == ([rows[0].where] if first_target >= max_length else [])
        assert encoded.cut == (first_target < max_length < len(whole.ids))
        if first_target < max_length:
            kept = encoded.examples[0]
            assert len(kept.ids) <= max_length
            assert kept.ids == whole.ids[: len(kept.ids)]
            assert kept.supervised == whole.supervised[: len(kept.ids)]
            assert kept.supervised[-1]
            assert sum(kept.supervised) == sum(whole.supervised[:max_length])


def test_nothing_left_names_the_length_that_would_do(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers["chatml"]
    rows = [chat("turn on the light", "yes"), chat("hi", "no")]
    shortest = min(only(row, tokenizer).supervised.index(True) for row in rows) + 1
    with pytest.raises(BadInput, match=rf"max_length 8 .* needs {shortest} tokens"):
        encode(rows, tokenizer, data(max_length=8))
    assert len(encode(rows, tokenizer, data(max_length=shortest)).examples) == 1
    with pytest.raises(BadInput, match="is left"):
        encode(rows, tokenizer, data(max_length=shortest - 1))


def test_rows_without_any_answer(tokenizers: Tokenizers) -> None:
    with pytest.raises(BadInput, match="holds an answer"):
        encode([chat("hi")], tokenizers["chatml"], data())
    encoded = encode([chat("hi"), chat("hi", "yes"), Document(" ", "e.txt:1", "text")], tokenizers["chatml"], data())
    assert len(encoded.examples) == 1
    assert encoded.dropped == ["x.jsonl:1", "e.txt:1"]
    with pytest.raises(BadInput, match="no row"):
        encode([], tokenizers["chatml"], data())


def test_the_tokens_behind_the_last_target_are_left_out(tokenizers: Tokenizers) -> None:
    asked_again = only(chat("hi", "yes", "and now?"), tokenizers["chatml"])
    assert asked_again.ids == only(chat("hi", "yes"), tokenizers["chatml"]).ids
    assert decoded(tokenizers["chatml"], list(asked_again.ids), special=True).endswith("yes<|im_end|>")


def test_supervising_all_keeps_the_prompt_apart(tokenizers: Tokenizers) -> None:
    answers_only, everything = (
        only(chat("turn on", "yes"), tokenizers["llama3"], supervise=choice) for choice in ("answers", "all")
    )
    assert everything.supervised == (False, *[True] * (len(everything.ids) - 1))
    assert (everything.prompt_length, everything.answer) == (answers_only.prompt_length, "yes")


def test_a_completion_that_spells_its_eos_has_one(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers["mistral"]
    spelt = only(Completion("<s>turn on", "yes</s>", "x:1", "prompt"), tokenizer)
    assert spelt.ids == only(Completion("turn on", "yes", "x:1", "prompt"), tokenizer).ids


def test_instructions_are_chats_where_there_is_a_template(tokenizers: Tokenizers) -> None:
    row = Instruction("Translate.", "light", "Licht", "x:1", "instruction")
    tokenizer = tokenizers["chatml"]
    assert only(row, tokenizer) == Example(
        **{**vars(only(chat("Translate.\n\nlight", "Licht"), tokenizer)), "where": "x:1"}
    )
    base = copy.deepcopy(tokenizer)
    base.chat_template = None
    example = only(row, base)
    prompt = decoded(base, list(example.ids[: example.prompt_length]))
    assert prompt.endswith("### Instruction:\nTranslate.\n\n### Input:\nlight\n\n### Response:\n")
    assert example.answer == "Licht"
    bare = only(Instruction("Hi {x}", "", "yes", "x:1", "instruction"), base)
    assert encode_prompt("Hi {x}", base, data(), "instruction") == list(bare.ids[: bare.prompt_length])
    asked = only(Instruction("Hi", "", "yes", "x:1", "instruction"), tokenizer)
    assert encode_prompt("Hi", tokenizer, data(), "instruction") == list(asked.ids[: asked.prompt_length])


def test_a_tokenizer_without_eos(tokenizers: Tokenizers) -> None:
    tokenizer = copy.deepcopy(tokenizers["plain"])
    tokenizer.eos_token = None
    with pytest.raises(BadInput, match="no EOS token"):
        encode([chat("hi", "yes")], tokenizer, data())


def test_the_format_is_recorded_and_must_be_known(tokenizers: Tokenizers) -> None:
    assert encode([chat("hi", "yes")], tokenizers["chatml"], data()).format == "messages"
    with pytest.raises(BadInput, match="unknown"):
        encode_prompt("hi", tokenizers["chatml"], data(), "auto")
