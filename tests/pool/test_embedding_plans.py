"""Plans of jobs that train embeddings: where it is possible, what it costs, and who fetches what for it."""

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pool.alike import data_plan, pipeline_plan, tensor_plan
from pool.profiles import SMOLLM2, job, profile, work
from pool.test_candidates import QUICK, of
from pool.test_train_embeddings import WIDE
from pool.tiny import config, save_tiny
from potluck.chain.comm import Comm
from potluck.errors import BadInput
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.models.families.decoder import Decoder
from potluck.models.families.fields import config_from
from potluck.models.fetched import Fetched
from potluck.pool.candidates import Candidate, best, if_data_moved, plans
from potluck.pool.cost import OWNER_BYTES, Prediction, Units, predict
from potluck.pool.plan import Plan, make_plan
from potluck.pool.profile import Work
from potluck.pool.rows import predict_data
from potluck.pool.strategies.build import part_for, prefetch_for
from potluck.pool.task import Tables, task_of
from potluck.pool.trainer import train
from word_model import save_rows, save_word_model
from worlds import run_world

TRAINS: dict[str, Any] = {"train": "full", "train_embeddings": True}
ELEMENTS = 49152 * 576
"""Of SmolLM2's table."""


def at_work(tied: bool) -> Work:
    return work(train="full", config=SMOLLM2 | {"tie_word_embeddings": tied})


def smollm2(tied: bool) -> Decoder:
    return decoder_of(config_from(at_work(tied).config))


def found(tied: bool, must: tuple[str, ...] = (), **fields: Any) -> list[Candidate]:
    pool = [profile(f"d{i}", link=QUICK, of=at_work(tied)) for i in range(3)]
    return plans(job(**{**TRAINS, **fields}), smollm2(tied), at_work(tied), pool, must)


STAY = r"data_stays: true forbids it; set data_stays: false\)\."
HEAD = rf"the embedding is the LM head too, .* need the token ids and labels \({STAY}"
ROWS = r"the gradient of the embedding shows which tokens its owner's rows have"
OWNERS = "only the coordinator has the embedding tables, .* leave it to one owner, or use strategy: data"


@pytest.mark.parametrize(
    ("tied", "owners", "stays", "strategy", "refusal"),
    [
        (True, 1, True, "tensor", HEAD),
        (True, 1, True, "tensor-uniform", HEAD),
        (True, 1, False, "tensor", None),
        (True, 2, False, "tensor", None),
        (False, 1, True, "tensor", None),
        (False, 2, True, "tensor", rf"{OWNERS} and data_stays: false\."),
        (False, 2, False, "tensor-uniform", rf"{OWNERS}\."),
        (True, 2, True, "data", ROWS),
        (False, 2, True, "data", ROWS),
        (False, 2, False, "data", None),
        (True, 1, False, "pipeline", None),
        (False, 1, True, "pipeline", rf"the (ids|labels) of .* \({STAY}"),
    ],
)
def test_where_it_is_possible(tied: bool, owners: int, stays: bool, strategy: str, refusal: str | None) -> None:
    names = [f"d{i}" for i in range(3)]
    candidates = found(tied, tuple(names[1:owners]), data_stays=stays)
    shape = config("llama", tie_word_embeddings=tied)
    by_hand = job(**TRAINS, strategy=strategy, devices="2", data_stays=stays, batch_size=8)
    if refusal is None:
        assert best(candidates, strategy).strategy == strategy
        make_plan(by_hand, shape, names[:2], names[:owners])
        return
    with pytest.raises(BadInput, match=rf"strategy: '{strategy}' cannot be carried out: .*{refusal}"):
        best(candidates, strategy)
    with pytest.raises(BadInput, match=rf"strategy: '{strategy}' is not possible: .*{refusal}"):
        make_plan(by_hand, shape, names[:2], names[:owners])


def test_a_tied_table_stays_with_one_device_unless_data_move() -> None:
    stays, moves = found(True), found(True, data_stays=False)
    assert best(stays).strategy == "single"
    assert of("tensor", stays).moves_data
    assert of("tensor", moves).moves_data
    assert not of("tensor", found(False)).moves_data
    pool = [profile(f"d{i}", link=QUICK, of=at_work(True)) for i in range(3)]
    said = if_data_moved(job(**TRAINS), smollm2(True), at_work(True), pool, (), best(stays), stays)
    assert said is not None
    assert said.startswith("If data could move, d0 + d1 + d2 (strategy ")
    with pytest.raises(BadInput, match="strategy: 'tensor' is not possible"):
        make_plan(job(**TRAINS, devices="2:1"), config("llama", tie_word_embeddings=True))
    assert make_plan(job(**TRAINS, devices="1"), config("llama", tie_word_embeddings=True)).strategy == "single"


def both(tied: bool, strategy: str) -> tuple[Prediction, Prediction, Plan]:
    """With trained embeddings and without, for the same plan."""
    candidate, frozen = (
        next(c for c in found(tied, data_stays=False, train_embeddings=t) if c.strategy == strategy)
        for t in (True, False)
    )
    assert candidate.plan is not None
    assert candidate.prediction is not None
    assert frozen.prediction is not None
    return candidate.prediction, frozen.prediction, candidate.plan


def more_memory(tied: bool, strategy: str) -> list[float]:
    trained, frozen, _ = both(tied, strategy)
    return [a.memory_bytes - b.memory_bytes for a, b in zip(trained.devices, frozen.devices, strict=True)]


def test_memory_of_tables_is_where_they_are() -> None:
    # value, gradient and two moments; a head that was frozen was its value alone
    assert more_memory(False, "tensor-uniform") == pytest.approx([16 * ELEMENTS, 0, 0])
    assert more_memory(True, "tensor-uniform") == pytest.approx([12 * ELEMENTS / 3] * 3)
    assert more_memory(False, "single")[0] == pytest.approx(16 * ELEMENTS)
    assert more_memory(True, "single")[0] == pytest.approx(12 * ELEMENTS)


def test_memory_of_stages_and_of_whole_models() -> None:
    _, _, plan = both(True, "pipeline-uniform")
    by_stage = sorted(range(3), key=lambda i: plan.devices[i].links.spans if plan.devices[i].links else ())
    chunks = 2 * (4 << 20)
    tied, untied = more_memory(True, "pipeline-uniform"), more_memory(False, "pipeline-uniform")
    assert [tied[i] for i in by_stage] == pytest.approx([16 * ELEMENTS + chunks, 0, 4 * ELEMENTS + chunks])
    assert [untied[i] for i in by_stage] == pytest.approx([16 * ELEMENTS, 0, 0])
    task = task_of(job(**TRAINS), smollm2(True), at_work(True))
    rest = task.trained.replicated + 9 * task.trained.head + 3 * task.trained.kv_head + 1536 * task.trained.column
    whole = more_memory(True, "data")
    n = len(whole)
    assert (rest + ELEMENTS) / n > ELEMENTS, "so that the table is no larger part than its home has anyway"
    assert whole == pytest.approx([4 * ELEMENTS + 8 * ELEMENTS / n] * n)


def test_seconds_of_a_trained_head_and_of_its_optimizer() -> None:
    pool, units = [profile("a", of=at_work(True))], [Units(9, 1536, 49152)]
    task = task_of(job(**TRAINS), smollm2(True), at_work(True))
    frozen = task_of(job(train="full"), smollm2(True), at_work(True))
    more_s = predict(task, pool, units).step_s - predict(frozen, pool, units).step_s
    walks = task.micro_batches * task.half_batches
    assert more_s == pytest.approx(walks * 0.0000021 * 49152 + 2e-9 * ELEMENTS)
    untied = task_of(job(**TRAINS), smollm2(False), at_work(False))
    without = replace(untied, tables=Tables())
    assert predict(untied, pool, units).step_s - predict(without, pool, units).step_s == pytest.approx(2e-9 * ELEMENTS)


def test_a_table_larger_than_all_else_has_its_home_on_the_first_device() -> None:
    shape = at_work(True).model_copy(update={"config": at_work(True).config | {"num_hidden_layers": 1}})
    task = task_of(job(**TRAINS), decoder_of(config_from(shape.config)), shape)
    pool = [profile(f"d{i}", link=QUICK, of=shape) for i in range(3)]
    said = predict_data(task, pool, [2, 1, 1], 2)
    rest = task.trained.replicated + 9 * task.trained.head + 3 * task.trained.kv_head + 1536 * task.trained.column
    assert rest < ELEMENTS / 2
    first, second, third = said.devices
    assert first.memory_bytes - second.memory_bytes == pytest.approx(8 * (ELEMENTS - rest / 2) + OWNER_BYTES)
    # each sends the gradients of what has its home elsewhere, and the values of what has it here to two others
    rows_bytes = (128 + 256 / 2) * 8
    assert first.bytes_sent == pytest.approx(4 * (rest + 2 * ELEMENTS) + 2 * rows_bytes)
    assert second.bytes_sent == third.bytes_sent == pytest.approx(4 * (rest + ELEMENTS + rest / 2))
    messages_s = 2 * 3 * 4 * ELEMENTS * 2 / 3 / QUICK.bytes_per_s
    assert said.message_s == pytest.approx(messages_s, rel=0.01)


PLANS = {
    "tensor": lambda decoder: tensor_plan(*WIDE["3"]),
    "pipeline": lambda decoder: pipeline_plan(decoder, [(2, 1), (0, 1), (1, 2)]),
    "data": lambda decoder: data_plan(decoder, [1.0, 1.0, 1.0]),
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", PLANS)
def test_a_device_fetches_the_rows_it_trains_and_no_more(name: str, tied: bool, tmp_path: Path) -> None:
    shape = config("gpt2", tie_word_embeddings=tied)
    decoder, directory = decoder_of(shape), save_tiny(shape, tmp_path / "model")
    plan = PLANS[name](decoder)
    listing = [
        {"name": f.name, "size": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in directory.iterdir()
    ]

    def fetch(file: str, runs: list[tuple[int, int]]) -> Iterator[bytes]:
        content = (directory / file).read_bytes()
        yield b"".join(content[offset : offset + length] for offset, length in runs)

    for rank in (1, 2):  # which have no data
        fetched = Fetched(tmp_path / f"cache-{rank}", listing, fetch)
        with Checkpoint.open(fetched.directory, fetched.need) as checkpoint:
            headers = fetched.bytes_fetched
            prefetch_for(
                plan,
                rank,
                checkpoint,
                decoder,
                None,
                owns=False,
                train_embeddings=True,
                progress=lambda done, total: None,
            )
            there = fetched.bytes_fetched
            part = part_for(
                plan, rank, checkpoint, decoder, compute=torch.float64, adapter=None, seed=0, train_embeddings=True
            )
            assert fetched.bytes_fetched == there
            assert there - headers == part.weight_bytes


def test_a_second_owner_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    model_dir = save_word_model(tmp_path / "model", tie_word_embeddings=False)
    data = str(save_rows(tmp_path / "data.jsonl"))
    wanted = job(**TRAINS, dtype="fp32", steps=1, data={"train": data})
    shape = read_config(model_dir)
    plan = make_plan(wanted.model_copy(update={"devices": "2"}), shape)

    def body(comm: Comm) -> None:
        with pytest.raises(BadInput, match=OWNERS):
            train(wanted, plan, decoder_of(shape), comm, model_dir, tmp_path, lambda event: None, owns=True)

    run_world(2, body)
