"""An owner's data as its device reads them, and what a job's rows make of the job."""

from dataclasses import replace
from pathlib import Path

import pytest

from class_model import CLASSES, ROWS, save_labelled
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import decoder_of, read_config
from potluck.models.families.decoder import Decoder
from potluck.pool.owner import Feed, read_training_data
from potluck.pool.spec import without_paths
from potluck.pool.tune import resolved
from potluck.texts.task_rows import read_for
from word_model import save_rows, save_word_model


def _decoder(model: Path) -> Decoder:
    return decoder_of(read_config(model))


def job_of(model: Path, train: Path, **data: object) -> Job:
    fields = {"model": str(model), "task": "sequence-classification", "output": model.parent / "out"}
    return Job.model_validate(fields | {"data": {"train": str(train), **data}})


def test_classes_of_the_coordinator_and_columns_of_the_guest(tmp_path: Path) -> None:
    model = save_word_model(tmp_path / "model")
    own = save_labelled(tmp_path / "own.jsonl")
    job = job_of(model, own, text="text")
    rows = read_for(job.task, job.data.train, job.data)
    job = resolved(job, rows, [])
    assert (job.data.text, job.data.label, job.data.labels) == ("text", "label", CLASSES)

    guests = tmp_path / "guest.csv"
    guests.write_text("sentence,class\nlight,sound\ndoor on,house\n")
    told = without_paths(job, [str(guests)])
    encoded = read_training_data(told, model, _decoder(model))
    assert [example.label for example in encoded.examples] == [2, 0]
    batch = Feed(encoded.examples, examples_a_turn=2, micro_batch_size=None, seed=0).batches(0)[0]
    assert batch.targets_N.tolist() == [2, 0]
    assert batch.layout.positions == ((0,), (1,))

    guests.write_text("sentence,class\nlight,garden\n")
    with pytest.raises(BadInput) as caught:
        read_training_data(told, model, _decoder(model))
    assert "garden" not in str(caught.value).splitlines()[0]  # the line that the coordinator is told


def test_a_job_that_is_only_measured_finds_its_classes(tmp_path: Path) -> None:
    model = save_word_model(tmp_path / "model")
    job = job_of(model, save_labelled(tmp_path / "own.jsonl"))
    encoded = read_training_data(job, model, replace(_decoder(model), max_positions=1))
    assert [example.label for example in encoded.examples] == [CLASSES.index(name) for _, name in ROWS]
    assert {len(example.ids) for example in encoded.examples} == {1}
    assert encoded.cut == 4


def test_a_named_column_must_be_in_the_coordinators_data(tmp_path: Path) -> None:
    job = job_of(tmp_path / "model", save_labelled(tmp_path / "own.jsonl"), label="spam")
    with pytest.raises(BadInput, match=r"data\.label names the column 'spam'; keys found: text, label"):
        read_for(job.task, job.data.train, job.data)


def test_answers_are_read_as_before(tmp_path: Path) -> None:
    model, data = save_word_model(tmp_path / "model"), save_rows(tmp_path / "data.jsonl")
    job = Job.model_validate({"model": str(model), "data": {"train": str(data)}, "output": tmp_path / "out"})
    job = resolved(job, read_for(job.task, job.data.train, job.data), [])
    assert job.data.format == "prompt"
    assert job.data.text is None
    encoded = read_training_data(job, model, _decoder(model))
    assert [example.answer for example in encoded.examples] == ["A", "B", "C", "D"]
