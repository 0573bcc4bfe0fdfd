"""Answers are found in what a chat template renders, whatever the template does."""

import copy
import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from one_example import END_OF_TURN, KINDS, USES_BOS, Tokenizers, chat, contents, data, decoded, only, runs_of_targets

from potluck.errors import BadInput
from potluck.texts.encode import encode, encode_prompt, stop_ids
from potluck.texts.formats import Chat, Message


def expected(kind: str, answer: str, last: bool) -> str:
    """The text an answer's targets must spell, special tokens left out."""
    match kind:
        case "llama3" | "gemma":
            return answer.strip()
        case "qwen3" if last:
            return f"<think>\n\n</think>\n\n{answer}"
        case "phi3" if last:
            return f"{answer}\n"
        case "plain":
            return f" {answer}\n"
    return answer


@pytest.mark.parametrize("kind", KINDS)
@given(turns=st.lists(st.tuples(contents, contents), min_size=1, max_size=3))
def test_targets_of_a_chat_are_its_answers(kind: str, tokenizers: Tokenizers, turns: list[tuple[str, str]]) -> None:
    tokenizer = tokenizers[kind]
    answers = [answer for _, answer in turns]
    example = only(chat(*itertools.chain(*turns)), tokenizer)
    runs = runs_of_targets(example)
    assert len(runs) == len(answers)
    for number, (run, answer) in enumerate(zip(runs, answers, strict=True), 1):
        last = number == len(answers)
        said, wanted = decoded(tokenizer, run), expected(kind, answer, last)
        if kind == "mistral":  # its decoder takes a space off the start
            said, wanted = said.strip(), wanted.strip()
        assert said == wanted
        if last or kind != "plain":
            assert END_OF_TURN[kind] in decoded(tokenizer, run, special=True)
    assert example.answer == decoded(tokenizer, runs[-1])
    assert list(example.ids[example.prompt_length :]) == runs[-1]
    if kind in USES_BOS:
        assert example.ids[0] == tokenizer.bos_token_id
        assert example.ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize("kind", KINDS)
@given(asked=contents, answer=contents)
def test_generation_begins_with_the_ids_that_were_trained(
    kind: str, tokenizers: Tokenizers, asked: str, answer: str
) -> None:
    tokenizer = tokenizers[kind]
    example = only(chat(asked, answer), tokenizer)
    assert encode_prompt(asked, tokenizer, data(), "messages") == list(example.ids[: example.prompt_length])


def test_a_system_message_is_rendered(tokenizers: Tokenizers) -> None:
    example = only(chat("hi", "yes", system="Be brief."), tokenizers["chatml"])
    text = decoded(tokenizers["chatml"], list(example.ids), special=True)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert example.answer == "yes"


def test_an_answer_that_opens_the_conversation(tokenizers: Tokenizers) -> None:
    row = Chat((Message("assistant", "a"), Message("user", "helpful"), Message("assistant", "b")), "x:1", "messages")
    for kind in ("chatml", "llama3", "thinking"):
        runs = runs_of_targets(only(row, tokenizers[kind]))
        assert [decoded(tokenizers[kind], run) for run in runs] == ["a", "b"]


def test_an_answer_whose_merge_reaches_over_the_border(tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers["chatml"]
    newline, two = tokenizer(["\n", "\n\n"], add_special_tokens=False)["input_ids"]
    assert [*newline, *newline] != two
    example = only(chat("hi", "\nyes"), tokenizer)  # the generation prompt ends in a newline, too
    assert example.answer == "\nyes"
    assert list(example.ids[example.prompt_length - 1 :][:2]) == [*newline, *newline]
    assert list(example.ids[: example.prompt_length]) == encode_prompt("hi", tokenizer, data(), "messages")


def test_a_template_that_writes_the_bos_twice_or_never(tokenizers: Tokenizers) -> None:
    right = only(chat("hi", "yes"), tokenizers["llama3"])
    for opening in ("", "{{ bos_token }}{{ bos_token }}"):
        other = copy.deepcopy(tokenizers["llama3"])
        other.chat_template = str(other.chat_template).replace("{{ bos_token }}", opening)
        assert only(chat("hi", "yes"), other) == right


def test_reasoning_that_a_template_drops_from_the_past(tokenizers: Tokenizers) -> None:
    tokenizer = copy.deepcopy(tokenizers["thinking"])
    tokenizer.chat_template = (
        "{% for m in messages %}{% set c = m['content'] %}{% if m['role'] == 'assistant' and not loop.last %}"
        "{% set c = c.split('</think>')[-1] %}{% endif %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + c + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    example = only(chat("1", "<think>a</think>one", "2", "<think>b</think>two"), tokenizer)
    assert [decoded(tokenizer, run) for run in runs_of_targets(example)] == ["one", "<think>b</think>two"]


def test_chats_without_a_template_name_the_choices(tokenizers: Tokenizers, tmp_path: Path) -> None:
    base = copy.deepcopy(tokenizers["plain"])
    base.chat_template = None
    with pytest.raises(BadInput, match=r"data\.template to 'chatml' or to the path of a \.jinja file \('auto'"):
        encode([chat("hi", "yes")], base, data())
    with pytest.raises(BadInput, match=r"data\.template"):
        encode_prompt("hi", base, data(), "messages")
    with pytest.raises(BadInput, match=r"none\.jinja cannot be read"):
        encode([chat("hi", "yes")], base, data(template=str(tmp_path / "none.jinja")))

    # Its vocabulary has no <|im_end|>, so ChatML closes turns with the EOS.
    example = only(chat("hi", "yes", "hi", "no"), base, template="chatml")
    assert [decoded(base, run, special=True) for run in runs_of_targets(example)] == [
        "yes<|endoftext|>",
        "no<|endoftext|>",
    ]
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m['role'][0] + '=' + m['content'] + ';' }}{% endfor %}")
    example = only(chat("hi", "yes"), base, template=str(own))
    assert decoded(base, list(example.ids), special=True) == "u=hi;a=yes;<|endoftext|>"
    own.write_text("{% for %}")
    with pytest.raises(BadInput, match=r"x\.jsonl:1: the chat template refuses"):
        encode([chat("hi", "yes")], base, data(template=str(own)))


def test_a_template_that_refuses_roles_is_quoted_with_the_line(tokenizers: Tokenizers) -> None:
    with pytest.raises(BadInput, match=r"x\.jsonl:1: the chat template refuses .*:\nSystem role not supported"):
        encode([chat("hi", "yes", system="s")], tokenizers["gemma"], data())


def test_a_template_that_rewrites_answers_is_refused(tokenizers: Tokenizers) -> None:
    tokenizer = copy.deepcopy(tokenizers["plain"])
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(BadInput, match="rewrites the answer in turn 2"):
        encode([chat("hi", "yes", "and", "no")], tokenizer, data())


@pytest.mark.parametrize("kind", KINDS)
def test_answers_end_with_a_token_that_stops_generation(kind: str, tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers[kind]
    stops = stop_ids(tokenizer, data(), "messages")
    assert stops == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(END_OF_TURN[kind])}
    assert only(chat("hi", "yes"), tokenizer).ids[-1] in stops
    assert stop_ids(tokenizer, data(), "prompt") == {tokenizer.eos_token_id}


# Not Llama 3's: with this pre-tokeniser its header's "\n\n" is one token only where nothing follows, as in generation.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama3"])
def test_a_chat_has_the_tokens_of_its_whole_text(kind: str, tokenizers: Tokenizers) -> None:
    tokenizer = tokenizers[kind]
    row = chat("turn on the light", "yes", "hi", "no")
    turns = [{"role": message.role, "content": message.content} for message in row.messages]
    whole = tokenizer(tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)["input_ids"]
    ids = list(only(row, tokenizer).ids)
    assert ids == [*whole, tokenizer.eos_token_id][: len(ids)]


def test_an_answer_begins_where_the_generation_prompt_ends(tokenizers: Tokenizers) -> None:
    tokenizer = copy.deepcopy(tokenizers["phi3"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>' + ' ' + m['content'] + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
    )
    runs = runs_of_targets(only(chat("hi", "yes", "and", "no"), tokenizer))
    assert [decoded(tokenizer, run) for run in runs] == [" yes", " no"]
