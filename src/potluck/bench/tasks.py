"""What a comparison trains on: rows with labels to divide them by, and rows that no client has."""

import importlib.util
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from potluck.errors import BadInput
from potluck.texts.codec import codec_of
from potluck.texts.formats import Row, parse_record

Item = TypeVar("Item")

NAMES = ("intents", "text", "postgres")

_HELD_OUT_TOPICS = 10  # one in so many
_MOST_HELD_OUT = 200


@dataclass(frozen=True)
class Task:
    """One job for all schemes of a comparison."""

    name: str
    train: tuple[Mapping[str, str], ...]
    """Records of one format that potluck reads: ``prompt`` and ``completion``, or ``text``."""
    held_out: tuple[Mapping[str, str], ...]
    """Records of templates or topics that are not in ``train``."""
    labels: tuple[str, ...]
    """Of each record of ``train``: its intent or topic, by which clients may differ."""
    max_length: int
    """Tokens that its examples need at most."""

    def held_out_rows(self) -> list[Row]:
        """The held-out records as the encoder takes them."""
        return [parse_record(dict(row), "auto", f"held-out:{n}") for n, row in enumerate(self.held_out, 1)]


def load_task(
    name: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    seed: int = 0,
    examples: int | None = None,
    max_length: int = 128,
) -> Task:
    """A task by its name.

    - ``intents``: smart-home commands and what they ask for, held out by template.
    - ``text``: Python's own reference, held out by topic; every token is learned.
    - ``postgres``: the PostgreSQL manual, held out by page; fetched once (:mod:`potluck.bench.manual`).

    Args:
        name: one of these.
        tokenizer: cuts documents; needed for ``text`` and ``postgres``.
        seed: draws sentences, the held-out topics and the subset.
        examples: how many to train on, drawn at random; all if left out or if there are fewer.
        max_length: tokens of an example of text.

    Raises:
        BadInput: there is no such task, a package it needs is missing, or the manual cannot be fetched.
    """
    match name:
        case "intents":
            task = _intents(seed)
        case "text":
            from pydoc_data.topics import topics

            task = text_task(name, topics, _needed(tokenizer, name), seed=seed, max_length=max_length)
        case "postgres":
            from potluck.bench.manual import postgres_manual

            task = text_task(name, postgres_manual(), _needed(tokenizer, name), seed=seed, max_length=max_length)
        case _:
            raise BadInput(f"There is no task '{name}'; there are {', '.join(NAMES)}.")
    return task if examples is None else subset(task, examples, seed)


def text_task(
    name: str, documents: Mapping[str, str], tokenizer: PreTrainedTokenizerBase, *, seed: int, max_length: int = 128
) -> Task:
    """Documents by topic, cut to examples of ``max_length`` tokens; one topic in ten is held out.

    Of the held-out topics' examples at most 200 are kept, drawn at random, so that judging stays short.

    Raises:
        BadInput: there are fewer than two topics, or the tokenizer does not say where its tokens lie.
    """
    topics = sorted(documents)
    if len(topics) < 2:
        raise BadInput(f"Task '{name}' has {len(topics)} topics; one to learn and one to hold out are needed.")
    rng = random.Random(f"{name} {seed}")
    held_out_topics = set(rng.sample(topics, max(1, len(topics) // _HELD_OUT_TOPICS)))
    train: list[tuple[str, str]] = []
    held_out: list[str] = []
    for topic in topics:
        pieces = [piece for piece in pieces_of(documents[topic], tokenizer, max_length) if piece.strip()]
        if topic in held_out_topics:
            held_out += pieces
        else:
            train += [(topic, piece) for piece in pieces]
    learned = {piece for _, piece in train}  # the same licence or table may stand in two topics
    held_out = [piece for piece in held_out if piece not in learned]
    judged = rng.sample(held_out, min(len(held_out), _MOST_HELD_OUT))
    return Task(
        name=name,
        train=tuple({"text": piece} for _, piece in train),
        held_out=tuple({"text": piece} for piece in judged),
        labels=tuple(topic for topic, _ in train),
        max_length=max_length,
    )


def pieces_of(text: str, tokenizer: PreTrainedTokenizerBase, max_length: int) -> list[str]:
    """A text cut between tokens: the pieces, joined, are the text, and each fits into ``max_length`` tokens.

    Room is left for the beginning and the end that the encoder adds. A piece cut out of its text may be tokenised
    otherwise than within it; one that then no longer fits is cut again.

    Raises:
        BadInput: the tokenizer does not say where its tokens lie in the text.
    """
    if not tokenizer.is_fast:
        raise BadInput("Texts cannot be cut by tokens: this tokenizer does not say where its tokens lie.")
    room = max_length - 1 - (codec_of(tokenizer).bos is not None)
    return _cut(text, tokenizer, room, room)


def _cut(text: str, tokenizer: PreTrainedTokenizerBase, each: int, room: int) -> list[str]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts: list[int] = [start for start, _ in encoded["offset_mapping"]]
    if len(starts) <= room or len(text) < 2:
        return [text]
    borders = sorted({0, *starts[each::each], len(text)})
    if len(borders) == 2:  # all of its tokens begin with one character
        borders = [0, len(text) // 2, len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(borders)]
    return [part for piece in pieces for part in _cut(piece, tokenizer, max(1, room // 2), room)]


def subset(task: Task, examples: int, seed: int) -> Task:
    """The task with so many of its training examples, drawn at random and kept in order.

    Raises:
        BadInput: less than one is asked for.
    """
    if examples < 1:
        raise BadInput(f"A task of {examples} examples cannot be trained on; ask for at least 1.")
    if examples >= len(task.train):
        return task
    kept = drawn(range(len(task.train)), examples, seed)
    return replace(
        task,
        train=tuple(task.train[index] for index in kept),
        labels=tuple(task.labels[index] for index in kept),
    )


def drawn(some: Sequence[Item], count: int | None, seed: int) -> list[Item]:
    """``count`` of them, at random and kept in order; all, if it is None or there are fewer."""
    if count is None or count >= len(some):
        return [*some]
    return [some[i] for i in sorted(random.Random(f"subset {seed}").sample(range(len(some)), count))]


def write_clients(task: Task, partition: Sequence[Sequence[int]], directory: Path) -> list[Path]:
    """Each client's training rows as a JSONL file, ``client-0.jsonl`` and so on, in the order of ``partition``.

    Args:
        task: whose ``train`` is divided.
        partition: what :func:`potluck.bench.partition.partition` returned.
        directory: made if it is missing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for client, indices in enumerate(partition):
        files.append(directory / f"client-{client}.jsonl")
        write_rows((task.train[index] for index in indices), files[-1])
    return files


def write_rows(rows: Iterable[Mapping[str, str]], path: Path) -> None:
    """Records as a JSONL file."""
    path.write_text("".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def _intents(seed: int) -> Task:
    if importlib.util.find_spec("home_assistant_intents") is None or importlib.util.find_spec("hassil") is None:
        raise BadInput("The task 'intents' needs the demo's sentences: pip install 'potluck[demo]'")
    from potluck.demo.intents import sample_commands

    commands = sample_commands(seed)
    return Task(
        name="intents",
        train=tuple(command.row() for command in commands.train),
        held_out=tuple(command.row() for command in commands.held_out),
        labels=tuple(command.intent for command in commands.train),
        max_length=96,
    )


def _needed(tokenizer: PreTrainedTokenizerBase | None, name: str) -> PreTrainedTokenizerBase:
    if tokenizer is None:
        raise BadInput(f"The task '{name}' cuts documents by tokens: give the model's tokenizer.")
    return tokenizer
