"""What a task counts, against the parts that are really built."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pool.profiles import job, tiny_work
from pool.tiny import FAMILIES, config, save_tiny, shares
from potluck.job_sections import IA3, Lora
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_for, decoder_of
from potluck.models.random_weights import RandomWeights
from potluck.pool.task import Tables, Task, task_of

COUNTS = ((6, 0, 3), (15, 9, 2), (31, 30, 0))


def counted(task: Task, kind: str, units: tuple[int, int, int, int]) -> float:
    per = getattr(task, kind)
    heads, kv, columns, rows = units
    return float(per.head * heads + per.kv_head * kv + per.column * columns + per.vocab_row * rows + per.replicated)


KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "full": {"train": "full"},
    "dora": {"lora": Lora(use_dora=True)},
    "dora of columns": {"lora": Lora(use_dora=True, targets=["q_proj", "v_proj", "up_proj"])},
    "ia3": {"train": "ia3"},
    "ia3 everywhere": {"train": "ia3", "ia3": IA3(targets=["all-linear"])},
}


@pytest.mark.parametrize("family", ["llama", "llama-biased", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("frozen", "optimizer", "compute"),
    [(0, "adamw", torch.float32), (1, "lion", torch.float32), (1, "adamw", torch.bfloat16)],
    ids=str,
)
def test_weights_and_trained_elements_are_those_of_the_built_parts(
    family: str, frozen: int, optimizer: str, compute: torch.dtype, kind: str, tmp_path: Path
) -> None:
    shape = config(family, tie_word_embeddings=False)
    the_job = job(**KINDS[kind], frozen_blocks=frozen, optimizer=optimizer)
    directory, decoder = save_tiny(shape, tmp_path / "model"), decoder_for(shape, the_job)
    heads, columns, rows = ((3, 0, 1), *COUNTS[1:]) if family == "gemma3" else COUNTS
    held = shares(shape, heads, columns, rows)
    dtype = "bf16" if compute == torch.bfloat16 else "fp32"
    task = task_of(the_job, decoder, tiny_work(family, **KINDS[kind], dtype=dtype))
    group = decoder.num_heads // decoder.num_kv_heads
    for rank in range(3):
        with Checkpoint.open(directory) as checkpoint:
            part = build_part(checkpoint, decoder, held, rank, compute=compute, adapter=the_job.adapter, seed=0)
        kv = len({head // group for head in held[rank].heads})
        units = (heads[rank], kv, columns[rank], rows[rank])
        elements = sum(t.local.numel() for t in part.chain.trained)
        states = (3 if optimizer == "adamw" else 2) * 4 * elements
        # biases are counted whether there are any or not: between nothing and 5 % of so small a model
        assert elements <= counted(task, "trained", units) <= 1.06 * elements + 400
        assert (
            part.weight_bytes + states <= counted(task, "weights", units) <= 1.06 * (part.weight_bytes + states) + 5000
        )
        partial = sum(t.local.numel() for t in part.chain.trained if t.gradient == "partial" and t.dim is None)
        whole = sum(t.local.numel() for t in part.chain.trained if t.dim is None)
        assert task.partial_bytes == 4 * partial
        assert 4 * whole <= task.whole_bytes <= 4 * whole + 2000


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_trained_tables_are_those_of_the_built_parts(family: str, tied: bool, tmp_path: Path) -> None:
    shape = config(family, tie_word_embeddings=tied)
    directory, decoder = save_tiny(shape, tmp_path / "model"), decoder_of(shape)
    held = shares(shape, *COUNTS)
    trains = {"train": "full", "train_embeddings": True}
    with_them, without = (
        task_of(job(**fields), decoder, tiny_work(family, train="full")) for fields in (trains, {"train": "full"})
    )
    for rank, rows in enumerate(COUNTS[2]):
        with Checkpoint.open(directory) as checkpoint:
            parts = [
                build_part(
                    checkpoint,
                    decoder,
                    held,
                    rank,
                    compute=torch.float32,
                    adapter=None,
                    seed=0,
                    train_embeddings=trained,
                )
                for trained in (True, False)
            ]
        more = sum(t.local.numel() for t in parts[0].chain.trained) - sum(
            t.local.numel() for t in parts[1].chain.trained
        )
        of_tables = with_them.tables.elements * (rank == 0)
        assert more == of_tables + rows * with_them.trained.vocab_row
        assert with_them.trained.vocab_row == decoder.hidden_size * tied
        states = parts[0].weight_bytes - parts[1].weight_bytes + 3 * 4 * more
        a_row = with_them.weights.vocab_row - without.weights.vocab_row
        assert with_them.tables.bytes * (rank == 0) + a_row * rows == states
    assert without.tables == Tables()


@pytest.mark.parametrize(
    ("fields", "owners", "half_batches", "micro_batches"),
    [
        ({"batch_size": 16}, 1, 2, 1),
        ({"batch_size": 16, "micro_batch_size": 4}, 1, 2, 4),
        ({"batch_size": 16, "micro_batch_size": 4}, 3, 2, 6),
        ({"batch_size": 16, "micro_batch_size": 1}, 1, 1, 16),
        ({"batch_size": 2}, 2, 1, 2),
        ({"batch_size": 16, "half_batches": 1}, 2, 1, 2),
    ],
)
def test_halves_and_micro_batches(fields: dict[str, Any], owners: int, half_batches: int, micro_batches: int) -> None:
    task = task_of(job(**fields), decoder_of(config("llama")), tiny_work(), owners=owners)
    assert (task.half_batches, task.micro_batches) == (half_batches, micro_batches)


def test_messages_travel_in_the_wires_dtype() -> None:
    decoder, work = decoder_of(config("llama")), tiny_work()
    full, half = (task_of(job(wire=wire), decoder, work) for wire in ("fp32", "bf16"))
    assert full.message_bytes == 2 * 8 * 45 * 4
    assert half.message_bytes == full.message_bytes / 2
    assert half.head_message_bytes == full.head_message_bytes / 2 == 6 * 45 * 2
    assert half.pair_bytes == full.pair_bytes == 2 * 6 * 4
    assert full.mlp_layers == 1 + 6 / 16


def test_adapters_on_some_linears_only() -> None:
    decoder, work = decoder_of(config("llama")), tiny_work()
    task = task_of(job(lora={"rank": 4, "targets": ["v_proj", "down_proj"]}), decoder, work)
    assert (task.trained.head, task.trained.kv_head, task.trained.column) == (0, 2 * 4 * 8, 2 * 4)
    assert task.trained.replicated == 2 * 2 * 4 * 45


@pytest.mark.parametrize("targets", [None, "all-linear", "mlp", "last"], ids=str)
@pytest.mark.parametrize("frozen", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_lowest_link_is_that_of_the_built_chain(family: str, frozen: int, targets: str | None) -> None:
    shape = config(family)
    names = decoder_of(shape).names
    asked = {"mlp": names.into[0], "last": f"{names.blocks}.1.{names.out}"}.get(str(targets), "all-linear")
    train = "full" if targets is None else "lora"
    the_job = job(train=train, frozen_blocks=frozen, lora={"targets": [asked]})
    decoder = decoder_for(shape, the_job)
    task = task_of(the_job, decoder, tiny_work(family, train=train))
    held = shares(shape, [decoder.num_heads], [decoder.intermediate_size], [decoder.vocab_size])
    lora = None if targets is None else the_job.lora
    chain = build_part(RandomWeights(decoder), decoder, held, 0, compute=torch.float32, adapter=lora, seed=0).chain
    assert task.lowest == chain.lowest_trained
    assert task.lowest_sends == bool(chain.links[task.lowest].replicated_trained)
    assert sum(task.graphs) == len(chain.links) - task.lowest
