"""The typical half-batch of a job."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import config

from potluck.job import Job
from potluck.job_sections import Data
from potluck.models.families.fields import fields_of
from potluck.pool.halves import deal
from potluck.pool.measured_work import work_of
from potluck.texts.batch import Example
from potluck.texts.collate import collate


def job(**fields: object) -> Job:
    return Job.model_validate(
        {"model": "-", "data": Data(train=["-"]), "output": Path("-"), "dtype": "fp32", "batch_size": 8} | fields
    )


def example(length: int, targets: int) -> Example:
    supervised = tuple(i >= length - targets for i in range(length))
    return Example(tuple(range(length)), supervised, "test", length - targets, None)


def test_equal_examples_are_their_own_mean() -> None:
    work = work_of(job(), config("llama"), [example(12, 5)] * 24)
    assert (work.rows, work.length, work.supervised) == (4, 12, 20)
    assert (work.dtype, work.train, work.checkpointing) == ("fp32", "lora", False)


def test_owners_and_micro_batches_divide_the_rows() -> None:
    examples = [example(12, 5)] * 24
    assert work_of(job(), config("llama"), examples, owners=2).rows == 2
    assert work_of(job(), config("llama"), examples, owners=3).rows == 2  # of 3: dealt 2 and 1
    assert work_of(job(micro_batch_size=2), config("llama"), examples).rows == 1
    assert work_of(job(micro_batch_size=6), config("llama"), examples, owners=4).rows == 1
    assert work_of(job(half_batches=1), config("llama"), examples).rows == 8
    assert work_of(job(), config("llama"), examples[:3]).rows == 2


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=8, max_size=8))
def test_of_one_batch_the_mean_of_its_halves(lengths: list[int]) -> None:
    examples = [example(length, 1 + length // 3) for length in lengths]
    work = work_of(job(), config("llama"), examples)
    batch = collate(sorted(examples, key=lambda each: len(each.ids)))
    halves = deal(batch.layout, None, 2)
    assert work.length == round(sum(half.shape_BS[1] for half in halves) / 2)
    assert abs(work.supervised - sum(len(half.positions_N) for half in halves) / 2) <= 0.5


def test_an_undecided_dtype_is_no_work() -> None:
    with pytest.raises(ValueError, match="dtype"):
        work_of(job(dtype="auto"), config("llama"), [example(12, 5)])


def test_copies_of_a_model_are_the_same_work() -> None:
    one, other = config("llama"), config("llama")
    one._name_or_path, other._name_or_path = "/here/model", "/there/model"
    assert fields_of(one) == fields_of(other)
