"""The owner's data: examples of a job, and the micro-batches of each step."""

from collections.abc import Sequence
from pathlib import Path

from potluck.job import Job
from potluck.models.families.decoder import Decoder
from potluck.models.reading import reads_of, tells_texts_apart
from potluck.texts.batch import Batch, Example
from potluck.texts.collate import collate
from potluck.texts.encode import Encoded
from potluck.texts.order import Order, micro_batches
from potluck.texts.task_rows import encode_for_task, read_for, with_classes
from potluck.texts.tokenizer import load_tokenizer
from potluck.texts.vocabulary import check_vocabulary


def read_training_data(job: Job, model_dir: Path, decoder: Decoder) -> Encoded:
    """The job's examples, none longer than the model's positions.

    Columns may be called otherwise than in the job: those of the coordinator's data are right, or it would have been
    refused, and a guest's data have their own names.

    Raises:
        BadInput: the data cannot be read or encoded, no example is left, or the model lacks a token.
    """
    rows = read_for(job.task, job.data.train, job.data, others=True)
    most = min(job.data.max_length, decoder.max_positions)
    data = with_classes(job.data, rows).model_copy(update={"max_length": most})
    encoded = encode_for_task(
        rows, load_tokenizer(model_dir), data, reads=reads_of(decoder), types=tells_texts_apart(decoder)
    )
    check_vocabulary(encoded.examples, decoder.vocab_size)
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
