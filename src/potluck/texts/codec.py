"""Text to token ids, with exactly one BOS where the tokenizer uses one, and a real EOS."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.errors import BadInput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Codec:
    """A tokenizer with what its special tokens mean for training."""

    tokenizer: "PreTrainedTokenizerBase"
    bos: int | None
    """The token every sequence begins with; None if this tokenizer adds none."""
    eos: int

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without any special token that the text does not spell out."""
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def begun(self, ids: Sequence[int]) -> list[int]:
        """The ids with exactly one BOS in front, whether the text spelt out none, one or several."""
        rest = list(ids)
        if self.bos is None:
            return rest
        while rest[:1] == [self.bos]:
            del rest[0]
        return [self.bos, *rest]

    def ended(self, ids: Sequence[int]) -> list[int]:
        """The ids with an EOS behind, unless the text spelt it out."""
        return list(ids) if list(ids[-1:]) == [self.eos] else [*ids, self.eos]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids without special tokens."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if isinstance(text, str) else "".join(text)


def codec_of(tokenizer: "PreTrainedTokenizerBase") -> Codec:
    """Find out how a tokenizer begins and ends a sequence.

    Whether it uses a BOS is seen from what it adds to a text: settings such as ``add_bos_token`` are missing or
    wrong in many checkpoints.

    Raises:
        BadInput: it names no EOS token, so that a model could not learn to stop.
    """
    eos = tokenizer.eos_token_id
    if not isinstance(eos, int):
        raise BadInput("The model's tokenizer names no EOS token, so an answer could not end: set its 'eos_token'.")
    bos = tokenizer.bos_token_id
    begins = list(tokenizer("a", verbose=False)["input_ids"][:1])
    return Codec(tokenizer, bos if isinstance(bos, int) and begins == [bos] else None, eos)
