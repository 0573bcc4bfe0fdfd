"""Labelled rows to examples: whole texts with the tokenizer's own special tokens, as a classifier reads them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from potluck.errors import BadInput
from potluck.job_sections import Data
from potluck.texts.batch import Example
from potluck.texts.encode import Encoded
from potluck.texts.labelled import Labelled

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Reads = Literal["first", "last"]
"""Which token's hidden state a classifier reads."""

_ROWS_AT_ONCE = 1000
_NAMES_TOLD = 20


def encode_labelled(
    rows: Sequence[Labelled], tokenizer: "PreTrainedTokenizerBase", data: Data, *, reads: Reads, types: bool
) -> Encoded:
    """Turn labelled rows into examples.

    A text is tokenised as :func:`encode_texts` does. Names of classes become their indices in ``data.labels``, values
    stay what they are.

    Raises:
        BadInput: as :func:`encode_texts`, there is no row, or a label is none of ``data.labels``: which one it is
            stands in a second line, since the first may travel where labels may not.
    """
    if not rows:
        raise BadInput("There is no row to learn from.")
    index = {name: i for i, name in enumerate(data.labels)}
    labels = [_label(row, index) for row in rows]
    pairs = None if rows[0].text_pair is None else [row.text_pair or "" for row in rows]
    examples, cut = encode_texts(
        [row.text for row in rows], pairs, [row.where for row in rows], tokenizer, data, reads=reads, types=types
    )
    labelled = [replace(example, label=label) for example, label in zip(examples, labels, strict=True)]
    return Encoded(labelled, dropped=[], cut=cut, format="auto")


def encode_texts(
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    where: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    data: Data,
    *,
    reads: Reads,
    types: bool,
) -> tuple[list[Example], int]:
    """Tokenise texts, or pairs of texts, as the tokenizer itself does, and cut them to ``data.max_length``.

    Of a pair, the longer text is cut first. Special tokens are the tokenizer's own, and are never cut.

    Args:
        texts: the texts.
        pairs: the second texts.
        where: the source of each.
        tokenizer: the model's.
        data: its ``max_length`` counts.
        reads: the first token of encoders, the last one of decoders.
        types: whether the model tells the texts of a pair apart by token types; the tokenizer must give them, too.

    Returns:
        Examples without a label, and how many were cut.

    Raises:
        BadInput: a text has no token, or ``max_length`` leaves no room for one beside the special tokens.
    """
    room = data.max_length - tokenizer.num_special_tokens_to_add(pair=pairs is not None)
    if room < (1 if pairs is None else 2):
        raise BadInput(
            f"data.max_length {data.max_length} leaves no room for text: the tokenizer adds {data.max_length - room} "
            "tokens of its own. Raise it."
        )
    types = types and "token_type_ids" in tokenizer.model_input_names
    examples: list[Example] = []
    cut = 0
    for start in range(0, len(texts), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        some = None if pairs is None else pairs[part]
        encoded = _tokenised(tokenizer, texts[part], some)
        long = [i for i, (ids, _) in enumerate(encoded) if len(ids) > data.max_length]
        if long:
            shortened = _tokenised(
                tokenizer,
                [texts[start + i] for i in long],
                None if pairs is None else [pairs[start + i] for i in long],
                max_length=data.max_length,
            )
            for i, tokens in zip(long, shortened, strict=True):
                encoded[i] = tokens
        cut += len(long)
        for (ids, of_text), source in zip(encoded, where[part], strict=True):
            examples.append(_example(ids, of_text if types else [], source, reads))
    return examples, cut


def _tokenised(
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    max_length: int | None = None,
) -> list[tuple[list[int], list[int]]]:
    """Token ids and token types of each text or pair."""
    encoded = tokenizer(
        list(texts),
        None if pairs is None else list(pairs),
        truncation=False if max_length is None else "longest_first",
        max_length=max_length,
        return_attention_mask=False,
        return_token_type_ids=True,
        verbose=False,
    )
    return list(zip(encoded["input_ids"], encoded["token_type_ids"], strict=True))


def _example(ids: list[int], types: list[int], where: str, reads: Reads) -> Example:
    if not ids:
        raise BadInput(f"{where}: the tokenizer makes no token of this text.")
    return Example(
        ids=tuple(ids),
        supervised=(False,) * len(ids),
        where=where,
        prompt_length=len(ids),
        answer=None,
        reads_at=0 if reads == "first" else len(ids) - 1,
        types=tuple(types) if any(types) else None,
    )


def _label(row: Labelled, index: dict[str, int]) -> float:
    if not isinstance(row.label, str):
        return row.label
    if row.label not in index:
        names = [f"'{name}'" for name in list(index)[:_NAMES_TOLD]] + ["..."] * (len(index) > _NAMES_TOLD)
        raise BadInput(
            f"{row.where}: the label of this row is none of the {len(index)} classes of the training rows; if it is "
            f"right, name all classes in data.labels.\nIt is '{row.label}'; the classes are {', '.join(names)}."
        )
    return index[row.label]
