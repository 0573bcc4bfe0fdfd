"""Classification and regression train exactly as the plain single-process model under every strategy, in float64."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pool.alike import check_alike, data_plan, pipeline_plan, tensor_plan
from pool.sequences import (
    ALPHA,
    RANK,
    SequenceModels,
    description,
    sequence_batch,
    sequence_steps,
    tiny_config,
)
from potluck.chain.classifier import Classifier, Kind
from potluck.chain.comm import Comm
from potluck.job_sections import Lora
from potluck.models.families import with_frozen
from potluck.pool.halves import encode_layouts
from potluck.pool.plan import Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.build import part_for
from potluck.pool.turns import Turn
from worlds import run_world

FAMILIES = ["llama", "gpt2", "bert", "roberta"]
WHOLE = description(tiny_config("llama"))
"""Heads and columns as all of them have."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> SequenceModels:
    return SequenceModels(tmp_path_factory.mktemp("models"))


def check_parity(
    models: SequenceModels,
    family: str,
    plan: Plan,
    *,
    lora: bool = True,
    targets: Sequence[str] = ("all-linear",),
    kind: Kind = "classes",
    frozen_blocks: int = 0,
    **how: Any,
) -> None:
    cfg = tiny_config(family, kind)
    decoder = with_frozen(description(cfg, kind), frozen_blocks)
    plain = models.plain(family, kind, tuple(targets) if lora else None, frozen=decoder.frozen)
    adapter = Lora(rank=RANK, alpha=ALPHA, targets=list(targets)) if lora else None
    check_alike(
        plan, decoder, models.checkpoint(family, kind), plain, sequence_steps(cfg, kind), adapter=adapter, **how
    )


WORLDS: dict[str, Plan] = {
    "1": tensor_plan([9], [26], [0]),
    "2": tensor_plan([0, 9], [26, 0], [0, 0]),
    "3": tensor_plan([5, 3, 1], [13, 9, 4], [0, 0, 0]),
}
PAIRS = [
    # world, lora, halves, recompute
    ("1", True, 2, False),
    ("1", False, 1, True),
    ("2", True, 1, True),
    ("2", False, 2, False),
    ("3", True, 2, False),
    ("3", False, 2, True),
]


@pytest.mark.parametrize(("world", "lora", "half_batches", "checkpointing"), PAIRS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor(
    models: SequenceModels, family: str, world: str, lora: bool, half_batches: int, checkpointing: bool
) -> None:
    check_parity(
        models,
        family,
        WORLDS[world],
        lora=lora,
        half_batches=half_batches,
        checkpointing=checkpointing,
    )


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_single_walks_without_messages(models: SequenceModels, family: str, lora: bool) -> None:
    check_parity(models, family, WORLDS["1"], lora=lora, messages=False)


@pytest.mark.parametrize("owners", [(1,), (0, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_owners_in_turn_are_one_owner_of_it_all(models: SequenceModels, family: str, owners: tuple[int, ...]) -> None:
    check_parity(models, family, WORLDS["3"], owners=owners)
    check_parity(models, family, WORLDS["3"], owners=owners, lora=False)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_data(models: SequenceModels, family: str, lora: bool) -> None:
    check_parity(models, family, data_plan(WHOLE, [1.42, 1.0], micro_batch_size=2), lora=lora)
    check_parity(models, family, data_plan(WHOLE, [1.0, 2.0, 1.0]), lora=lora, owners=(2, 0))


def test_owners_walk_their_own_rows(models: SequenceModels) -> None:
    check_parity(models, "roberta", data_plan(WHOLE, [0.0, 0.0]), owners=(0, 1))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_pipeline(models: SequenceModels, family: str, lora: bool) -> None:
    check_parity(models, family, pipeline_plan(WHOLE, [(0, 1), (1, 3)]), lora=lora)
    check_parity(
        models, family, pipeline_plan(WHOLE, [(2, 1), (0, 1), (1, 2)]), lora=lora, checkpointing=True, owners=(1, 0)
    )


@pytest.mark.parametrize("name", ["tensor", "data", "pipeline"])
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_regression(models: SequenceModels, family: str, name: str) -> None:
    plans = {
        "tensor": WORLDS["3"],
        "data": data_plan(WHOLE, [1.0, 1.0]),
        "pipeline": pipeline_plan(WHOLE, [(1, 2), (0, 2)]),
    }
    check_parity(models, family, plans[name], kind="value")
    check_parity(models, family, plans[name], kind="value", lora=False)


@pytest.mark.parametrize("plan", [WORLDS["2"], pipeline_plan(WHOLE, [(0, 2), (1, 2)])], ids=["tensor", "stages"])
@pytest.mark.parametrize("targets", ["encoder.layer.1.output.dense", "layer.0.attention.self.query"])
def test_adapters_in_one_block(models: SequenceModels, plan: Plan, targets: str) -> None:
    check_parity(models, "bert", plan, targets=[targets])


def test_no_message_tells_a_label(models: SequenceModels) -> None:
    cfg = tiny_config("bert")
    batches = [sequence_batch(cfg, (9, 7, 5), 3), sequence_batch(cfg, (8, 8), 4)]
    heard: list[list[tuple[str, Tensor]]] = [[], []]
    plan, decoder, checkpoint = tensor_plan([5, 4], [20, 6], [0, 0]), description(cfg), models.checkpoint("bert")

    def body(comm: Comm) -> None:
        part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float32, adapter=Lora(rank=2), seed=0)
        stepper = Stepper(part, comm, Settings(steps=1, learning_rate=1e-3))
        stepper.step([Turn(0, batches if comm.rank == 0 else None)])

    run_world(2, body, listener=lambda rank: lambda kind, content: heard[rank].append((kind, content.clone())))
    whole_numbers = [content for rank in heard for _, content in rank if not content.is_floating_point()]
    encoded = encode_layouts([batch.layout for batch in batches])
    assert [content.tolist() for content in whole_numbers] == [[encoded.numel()], encoded.tolist()]


def test_a_head_that_the_checkpoint_lacks_is_drawn_alike_everywhere(models: SequenceModels) -> None:
    cfg = tiny_config("roberta")
    plan, decoder, checkpoint = WORLDS["3"], description(cfg), models.checkpoint("roberta")

    def weights(rank: int, seed: int) -> dict[str, Tensor]:
        part = part_for(plan, rank, checkpoint, decoder, compute=torch.float32, adapter=Lora(rank=2), seed=seed)
        assert isinstance(part.head, Classifier)
        return {t.name: t.local.detach() for t in part.chain.last_trained if "lora" not in t.name}

    first, second, other = weights(0, 5), weights(2, 5), weights(0, 6)
    assert list(first) == [
        f"classifier.{layer}.{what}" for layer in ("dense", "out_proj") for what in ("weight", "bias")
    ]
    assert all(torch.equal(first[name], second[name]) for name in first)
    for layer in ("dense", "out_proj"):
        assert not torch.equal(first[f"classifier.{layer}.weight"], other[f"classifier.{layer}.weight"])
        assert not first[f"classifier.{layer}.bias"].any()
        assert float(first[f"classifier.{layer}.weight"].std()) == pytest.approx(cfg.initializer_range, rel=0.2)
