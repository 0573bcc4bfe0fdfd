"""Rows to examples: token ids, and which of them are targets.

Masks come from the lengths of tokenised prefixes, never from the value of a token: the padding id may equal the EOS.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING

from potluck.errors import BadInput
from potluck.job_sections import Data, Format
from potluck.texts.batch import Example
from potluck.texts.chat import Rendered, Template, has_template, load_template, render
from potluck.texts.codec import Codec, codec_of
from potluck.texts.formats import Chat, Completion, Document, Instruction, Message, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ALPACA = (
    "Below is an instruction that describes a task{material_clause}. Write a response that appropriately completes"
    " the request.\n\n### Instruction:\n{instruction}\n\n{material}### Response:\n"
)


@dataclass(frozen=True)
class Encoded:
    """What became of the rows."""

    examples: list[Example]
    dropped: list[str]
    """``where`` of each row without a target left within ``max_length``."""
    cut: int
    """How many of the examples lost targets at their end. A long document is not cut but becomes several examples."""
    format: Format
    """The format of the first row: what :func:`encode_prompt` needs to know."""


@dataclass(frozen=True)
class _Sequence:
    ids: list[int]
    answers: list[tuple[int, int]]
    """Token ranges ``[start, stop)``, ascending."""
    learn_all: bool
    where: str


def encode(rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase", data: Data) -> Encoded:
    """Turn rows into examples.

    - Conversations are rendered by the chat template; each assistant turn is an answer, with its end-of-turn token.
    - Instructions are such conversations where there is a template, else they follow the Alpaca prompt.
    - Prompt and completion are tokenised apart and joined, so that the prompt's ids are those generation begins with.
    - A document longer than ``data.max_length`` becomes several examples; each of its tokens is a target once.

    Every sequence begins with one BOS if the tokenizer uses one. Tokens behind the last target are left out: nothing
    depends on them.

    Raises:
        BadInput: no example is left, there is no chat template for conversations, or it refuses one.
    """
    if not rows:
        raise BadInput("There is no row to learn from.")
    encoder = _Encoder(codec_of(tokenizer), data)
    examples: list[Example] = []
    dropped: list[str] = []
    cut = 0
    lengths_needed: list[int] = []
    for row in rows:
        for sequence in encoder.sequences(row):
            targets = _targets(sequence)
            kept = [target for target in targets if target < data.max_length]
            if kept:
                examples.append(_example(sequence, kept, encoder.codec))
                cut += len(kept) < len(targets)
            else:
                dropped.append(sequence.where)
                lengths_needed += [target + 1 for target in targets[:1]]
    if not examples:
        raise BadInput(_nothing_left(rows, data.max_length, lengths_needed))
    return Encoded(examples, dropped, cut, rows[0].format)


def encode_prompt(text: str, tokenizer: "PreTrainedTokenizerBase", data: Data, format: Format) -> list[int]:
    """Token ids that generation begins with, on the path that training took for its prompts.

    Args:
        text: what the person asks; for chat formats, the content of one user turn.
        tokenizer: the one that was trained with.
        data: the training job's data section.
        format: the format of the training rows, :attr:`Encoded.format`.

    Raises:
        BadInput: ``format`` is ``auto``, or needs a chat template and there is none.
    """
    encoder = _Encoder(codec_of(tokenizer), data)
    match format:
        case "messages" | "conversations":
            return encoder.chat_prompt(text)
        case "instruction" if encoder.template_for_instructions:
            return encoder.chat_prompt(text)
        case "instruction":
            text = _alpaca_prompt(text, "")
        case "auto":
            raise BadInput("The format the model was trained with is unknown: name it instead of 'auto'.")
    return encoder.codec.begun(encoder.codec.ids([text])[0])


def stop_ids(tokenizer: "PreTrainedTokenizerBase", data: Data, format: Format) -> frozenset[int]:
    """The tokens that end an answer as training wrote it: the EOS, and the chat template's end of turn.

    Raises:
        BadInput: as :func:`encode_prompt`.
    """
    encoder = _Encoder(codec_of(tokenizer), data)
    chat = format in ("messages", "conversations") or (format == "instruction" and encoder.template_for_instructions)
    if not chat:
        return frozenset({encoder.codec.eos})
    asked = [Message("user", "a"), Message("assistant", "a"), Message("user", "a"), Message("assistant", "a")]
    ends = set()
    for turns in (asked[:2], asked):
        sequence = encoder.chat(turns, "data.template")
        ends |= {sequence.ids[stop - 1] for _, stop in sequence.answers}
    special = set(tokenizer.added_tokens_decoder)
    return frozenset((ends & special) | {encoder.codec.eos})


class _Encoder:
    """One row to token sequences; the template is loaded when the first conversation needs it."""

    def __init__(self, codec: Codec, data: Data) -> None:
        self.codec = codec
        self._data = data
        self._template: Template | None = None

    @property
    def template_for_instructions(self) -> bool:
        return has_template(self.codec.tokenizer, self._data.template)

    def sequences(self, row: Row) -> Iterator[_Sequence]:
        match row:
            case Document():
                yield from self._windows(row)
            case Completion():
                yield self._completion(row.prompt, row.completion, row.where)
            case Chat():
                yield self.chat(row.messages, row.where)
            case Instruction() if self.template_for_instructions:
                asked = "\n\n".join(part for part in (row.instruction, row.material) if part)
                yield self.chat([Message("user", asked), Message("assistant", row.output)], row.where)
            case Instruction():
                yield self._completion(_alpaca_prompt(row.instruction, row.material), row.output, row.where)

    def chat(self, messages: Sequence[Message], where: str) -> _Sequence:
        rendered = render(self._loaded_template(), messages, where)
        ids, answers = _tokenised(self.codec, rendered)
        if rendered.needs_eos:
            start, stop = answers.pop()
            ids = [*ids[:stop], self.codec.eos]
            answers.append((start, stop + 1))
        return _Sequence(ids, answers, self._learn_prompts, where)

    def chat_prompt(self, text: str) -> list[int]:
        rendered = render(self._loaded_template(), [Message("user", text), Message("assistant", "a")], "the prompt")
        start, _ = rendered.answers[-1]
        return self.codec.begun(self.codec.ids([rendered.text[:start]])[0])

    @property
    def _learn_prompts(self) -> bool:
        return self._data.supervise == "all"

    def _loaded_template(self) -> Template:
        if self._template is None:
            self._template = load_template(self.codec.tokenizer, self._data.template)
        return self._template

    def _completion(self, prompt: str, completion: str, where: str) -> _Sequence:
        prompt_ids, completion_ids = self.codec.ids([prompt, completion])
        begun = self.codec.begun(prompt_ids)
        ids = begun + self.codec.ended(completion_ids)
        return _Sequence(ids, [(len(begun), len(ids))], self._learn_prompts, where)

    def _windows(self, row: Document) -> Iterator[_Sequence]:
        if not row.text.strip():
            yield _Sequence([], [], True, row.where)
            return
        ids = self.codec.ended(self.codec.begun(self.codec.ids([row.text])[0]))
        new_tokens = self._data.max_length - 1
        starts = range(1, len(ids), new_tokens)
        for part, start in enumerate(starts, 1):
            context = ids[start - 1] if self.codec.bos is None else self.codec.bos
            where = f"{row.where} (part {part})" if len(starts) > 1 else row.where
            yield _Sequence([context, *ids[start : start + new_tokens]], [], True, where)


def _tokenised(codec: Codec, rendered: Rendered) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the answers as token ranges.

    A prompt must have the tokens it will have in generation, where nothing follows it. So the parts between the
    answers' borders are tokenised one by one. Tokenizers that open each text with a space would put one into every
    part: where the whole text begins with just the tokens that each of its prefixes has alone, the whole is taken.
    """
    text = rendered.text
    borders = sorted({border for span in rendered.answers for border in span})
    whole, *parts = codec.ids([text, *(text[a:b] for a, b in pairwise([0, *borders, len(text)]))])
    ids = list(chain.from_iterable(parts))
    at = dict(zip(borders, accumulate(map(len, parts)), strict=False))
    if ids != whole:
        prefixes = codec.ids([text[:border] for border in borders])
        if all(whole[: len(prefix)] == prefix for prefix in prefixes):
            ids, at = whole, dict(zip(borders, map(len, prefixes), strict=True))
    begun = codec.begun(ids)
    moved = len(begun) - len(ids)
    return begun, [(max(at[start] + moved, 0), at[stop] + moved) for start, stop in rendered.answers]


def _targets(sequence: _Sequence) -> list[int]:
    """Indices of the tokens to be learnt, ascending. The first token has nothing before it to be said after."""
    if sequence.learn_all:
        return list(range(1, len(sequence.ids)))
    return [token for start, stop in sequence.answers for token in range(max(start, 1), stop)]


def _example(sequence: _Sequence, targets: list[int], codec: Codec) -> Example:
    ids = sequence.ids[: targets[-1] + 1]
    targeted = set(targets)
    kept_answers = [(max(start, 1), min(stop, len(ids))) for start, stop in sequence.answers if start < len(ids)]
    start, stop = kept_answers[-1] if kept_answers else (1, 1)
    return Example(
        ids=tuple(ids),
        supervised=tuple(token in targeted for token in range(len(ids))),
        where=sequence.where,
        prompt_length=start,
        answer=codec.decode(ids[start:stop]) if kept_answers else None,
    )


def _alpaca_prompt(instruction: str, material: str) -> str:
    clause = ", paired with an input that provides further context" if material else ""
    section = f"### Input:\n{material}\n\n" if material else ""
    return _ALPACA.format(material_clause=clause, instruction=instruction, material=section)


def _nothing_left(rows: Sequence[Row], max_length: int, lengths_needed: list[int]) -> str:
    if not lengths_needed:
        return f"None of the {len(rows)} rows (first: {rows[0].where}) holds an answer or text to learn."
    return (
        f"No example is left: with max_length {max_length} every answer is cut away. The shortest needs"
        f" {min(lengths_needed)} tokens up to its first supervised one: raise data.max_length to at least that."
    )
