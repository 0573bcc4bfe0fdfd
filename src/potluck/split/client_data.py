"""A client's texts as examples, and the part of them that is held back to judge by."""

import hashlib
import hmac
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import BadInput
from potluck.job_sections import Data, Format
from potluck.models.durable import saving
from potluck.split.terms import Terms
from potluck.texts.batch import Example
from potluck.texts.encode import encode
from potluck.texts.rows import Row
from potluck.texts.tokenizer import load_tokenizer
from potluck.texts.vocabulary import check_vocabulary

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_COUNT = re.compile(r"\d+")


@dataclass(frozen=True)
class ClientData:
    """What a client contributes, before it is computed."""

    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    dropped: int
    """Rows without a target within the longest example."""
    digest: str
    """Of ids, targets and which are held out, keyed with the client's own key: nobody else can test a guess by it."""
    format: Format
    """How the rows were read."""

    @property
    def seed(self) -> int:
        """For drawing negatives: independent of every other client's, the same for the same data."""
        return int(hashlib.sha256(f"negatives {self.digest}".encode()).hexdigest()[:16], 16)


@dataclass(frozen=True)
class Holdout:
    """How many examples are held back: a part of them, or a number."""

    part: float = 0.0
    count: int = 0

    def of(self, examples: int) -> int:
        """How many of so many.

        Raises:
            BadInput: none would be left to train on.
        """
        held = max(self.count, round(self.part * examples), 1 if self.part else 0)
        if held >= examples:
            raise BadInput(f"--holdout would keep {held} of {examples} examples: none would be left to train on.")
        return held


def parse_holdout(text: str) -> Holdout:
    """``10%`` of the examples, or their number.

    Raises:
        BadInput: it is neither.
    """
    if (percent := _PERCENT.fullmatch(text.strip())) and float(percent[1]) < 100:
        return Holdout(part=float(percent[1]) / 100)
    if _COUNT.fullmatch(text.strip()):
        return Holdout(count=int(text))
    raise BadInput(f"--holdout {text!r}: give a part below 100%, such as 10%, or a number of examples.")


def client_data(
    rows: Sequence[Row], model_dir: Path, terms: Terms, holdout: Holdout, key: str, spool: Path
) -> ClientData:
    """Rows as examples, cut as the terms say.

    Args:
        rows: of this client.
        model_dir: with the tokenizer.
        terms: the server's.
        holdout: drawn at random, the same ones each time for the same examples.
        key: the client's own.
        spool: a directory of the client's, for the server's chat template.

    Raises:
        BadInput: no example is left, or one holds a token that the model does not have.
        SaveFailed: the disk is full.
    """
    encoded = encode(rows, load_tokenizer(model_dir), _data(terms, spool))
    check_vocabulary(encoded.examples, terms.vocab_size)
    examples = encoded.examples
    held = holdout.of(len(examples))
    keyed = hmac.new(key.encode(), digestmod=hashlib.sha256)
    for example in examples:
        keyed.update(repr((example.ids, example.supervised)).encode())
    keyed.update(repr(held).encode())
    order = list(range(len(examples)))
    random.Random(keyed.hexdigest()).shuffle(order)
    chosen = frozenset(order[:held])
    return ClientData(
        tuple(example for i, example in enumerate(examples) if i not in chosen),
        tuple(example for i, example in enumerate(examples) if i in chosen),
        len(encoded.dropped),
        keyed.hexdigest(),
        encoded.format,
    )


def _data(terms: Terms, spool: Path) -> Data:
    """How examples are encoded; positions are one fewer than tokens, since the last one is only a target."""
    template = terms.data.template
    if terms.template is not None:
        path = spool / "template.jinja"
        with saving(spool):
            path.write_text(terms.template, encoding="utf-8")
        template = str(path)
    elif template not in ("auto", "chatml"):
        raise BadInput("The server's terms name a chat template of its own, but do not bring its text.")
    longest = min(terms.data.max_length, terms.longest + 1)
    return terms.data.model_copy(update={"template": template, "max_length": longest, "train": [], "eval": []})
