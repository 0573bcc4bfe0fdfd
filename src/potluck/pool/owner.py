"""The owner's data: examples of a job, and the micro-batches of each step."""

from collections.abc import Sequence
from pathlib import Path

from potluck.job import Job
from potluck.texts.batch import Batch, Example
from potluck.texts.collate import collate
from potluck.texts.encode import Encoded, encode
from potluck.texts.order import Order, micro_batches
from potluck.texts.rows import read_rows
from potluck.texts.tokenizer import load_tokenizer
from potluck.texts.vocabulary import check_vocabulary


def read_training_data(job: Job, model_dir: Path, *, vocab_size: int, max_positions: int) -> Encoded:
    """The job's examples, none longer than the model's positions.

    Raises:
        BadInput: the data cannot be read or encoded, no example is left, or the model lacks a token.
    """
    data = job.data.model_copy(update={"max_length": min(job.data.max_length, max_positions)})
    encoded = encode(read_rows(data.train, data.format), load_tokenizer(model_dir), data)
    check_vocabulary(encoded.examples, vocab_size)
    return encoded


class Feed:
    """One owner's micro-batches of any of its turns, in an order that follows from the job's seed alone."""

    def __init__(self, examples: Sequence[Example], *, examples_a_turn: int, micro_batch_size: int | None, seed: int):
        self._examples = examples
        self._order = Order([len(example.ids) for example in examples], examples_a_turn, seed)
        self._micro = micro_batch_size or examples_a_turn

    def batches(self, turn: int) -> list[Batch]:
        """What this owner brings to its turn ``turn`` (from 0)."""
        indices = self._order.indices(turn)
        return [collate([self._examples[i] for i in part]) for part in micro_batches(indices, self._micro)]
