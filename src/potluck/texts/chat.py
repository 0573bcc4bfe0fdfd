"""Conversations through a chat template, and where in the result the assistant's answers are."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jinja2 import TemplateError

from potluck.errors import BadInput
from potluck.texts.formats import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + END_OF_TURN + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_STAND_IN = "\ue000answer\ue001"
"""Private-use characters that no template treats specially and no data holds."""


@dataclass(frozen=True)
class Template:
    """A chat template (Jinja source) with the tokenizer whose special tokens it spells."""

    tokenizer: "PreTrainedTokenizerBase"
    source: str
    marks: tuple[str, ...]
    """The tokenizer's added tokens, such as ``<|im_end|>``: they end turns."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """For each assistant turn, the characters ``[start, stop)`` to be learnt: all that generation would have to write
    after the prompt, its end-of-turn token included."""
    needs_eos: bool
    """The conversation ends with an answer that the template closes with no special token."""


class _RefusedError(Exception):
    """The template does not accept these messages."""


def has_template(tokenizer: "PreTrainedTokenizerBase", choice: str) -> bool:
    """Whether conversations can be rendered with this choice of ``data.template``."""
    return choice != "auto" or bool(tokenizer.chat_template)


def load_template(tokenizer: "PreTrainedTokenizerBase", choice: str) -> Template:
    """The template that ``data.template`` chooses: ``auto``, ``chatml``, or the path of a Jinja file.

    ChatML ends a turn with ``<|im_end|>`` where that is one token, else with the tokenizer's EOS: the vocabulary is
    never resized.

    Raises:
        BadInput: ``auto`` and the tokenizer has no template, or the file cannot be read.
    """
    if choice == "auto":
        source = tokenizer.chat_template
        if isinstance(source, dict):
            source = source.get("default")
        if not source:
            raise BadInput(
                "The data are conversations, but the model's tokenizer has no chat template: set data.template to"
                " 'chatml' or to the path of a .jinja file ('auto' takes the tokenizer's own)."
            )
    elif choice == "chatml":
        is_token = "<|im_end|>" in tokenizer.get_vocab()
        source = _CHATML.replace("END_OF_TURN", "'<|im_end|>'" if is_token else "eos_token")
    else:
        try:
            source = Path(choice).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise BadInput(
                f"data.template: {choice} cannot be read ({reason}); the choices are 'auto', 'chatml' or the path of"
                " a .jinja file."
            ) from None
    marks = {token.content for token in tokenizer.added_tokens_decoder.values() if token.content.strip()}
    return Template(tokenizer, source, tuple(sorted(marks)))


def render(template: Template, messages: Sequence[Message], where: str) -> Rendered:
    """Render a conversation and find its answers.

    An answer begins where the generation prompt ends, so that what a model is trained to continue is what generation
    gives it; it ends behind its end-of-turn token. Both places come from rendering the conversation up to the answer,
    and up to its end; where a template renders the past differently (it drops old reasoning, or closes only the last
    turn), from rendering it with a stand-in for the answer.

    Raises:
        BadInput: the template refuses the messages, is not valid Jinja, or rewrites answers beyond recognition.
    """
    try:
        text = _rendered(template, messages)
    except _RefusedError as refusal:
        # on a line of its own: a template from another machine may quote the text, and only first lines are sent there
        raise BadInput(f"{where}: the chat template refuses this conversation:\n{refusal}") from None
    answers: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        if message.role != "assistant":
            continue
        span = _span_by_prefix(template, messages, index, text) or _span_by_stand_in(template, messages, index, text)
        if span is None or (answers and span[0] < answers[-1][1]):
            raise BadInput(
                f"{where}: the chat template rewrites the answer in turn {index + 1}, so its place cannot be found;"
                " set data.template to another one ('chatml' or the path of a .jinja file)."
            )
        answers.append(span)
    last_is_answer = messages[-1].role == "assistant"
    needs_eos = last_is_answer and not text[slice(*answers[-1])].endswith(template.marks)
    return Rendered(text, tuple(answers), needs_eos)


def _span_by_prefix(template: Template, messages: Sequence[Message], index: int, text: str) -> tuple[int, int] | None:
    try:
        before = _rendered(template, messages[:index], generation_prompt=True)
        through = _rendered(template, messages[: index + 1])
    except _RefusedError:
        return None
    if not (text.startswith(through) and through.startswith(before)):
        return None
    closed = through.rstrip()
    ends_with_mark = len(closed) > len(before) and closed.endswith(template.marks)
    return len(before), len(closed) if ends_with_mark else len(through)


def _span_by_stand_in(template: Template, messages: Sequence[Message], index: int, text: str) -> tuple[int, int] | None:
    stood_in = [*messages[:index], Message("assistant", _STAND_IN), *messages[index + 1 :]]
    try:
        head, found, tail = _rendered(template, stood_in).partition(_STAND_IN)
    except _RefusedError:
        return None
    if not (found and text.startswith(head) and text.endswith(tail) and len(head) + len(tail) <= len(text)):
        return None
    start, stop = len(head), len(text) - len(tail)
    try:
        before = _rendered(template, messages[:index], generation_prompt=True)
        if text.startswith(before) and len(before) <= start:
            start = len(before)
    except _RefusedError:
        pass
    behind = tail.lstrip()
    mark = max((mark for mark in template.marks if behind.startswith(mark)), key=len, default="")
    return start, stop + (len(tail) - len(behind) + len(mark) if mark else 0)


def _rendered(template: Template, messages: Sequence[Message], generation_prompt: bool = False) -> str:
    if not messages:
        raise _RefusedError("there is no message")
    try:
        text = template.tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            chat_template=template.source,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise _RefusedError(" ".join(str(error).split()) or type(error).__name__) from None
    if not isinstance(text, str):
        raise _RefusedError("it renders no text")
    return text
