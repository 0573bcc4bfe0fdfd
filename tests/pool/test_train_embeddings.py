"""Trained embeddings are the plain model's under every strategy, tied or not, in float64; ids stay if they may."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pool.alike import Counts, check_alike, data_plan, pipeline_plan, tensor_plan
from pool.leaks import leaks, secrets
from pool.parity_models import CLIP, Models, Steps, turns_of
from pool.plain import EMBEDDINGS, PlainRun
from pool.sequences import SequenceModels, description, sequence_steps, tiny_config
from pool.tiny import VOCAB, batch, config, three_steps
from potluck.chain.comm import Comm
from potluck.chain.trained_embedding import TrainedEmbedding
from potluck.models.families import decoder_of
from potluck.models.families.decoder import Decoder
from potluck.models.weights import Weights
from potluck.pool.halves import decode_layouts
from potluck.pool.plan import Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.build import part_for, strategy_for
from worlds import run_world

PAD = config("llama").pad_token_id


def with_padding_inside() -> Steps:
    """Three steps whose rows hold the padding token too: its row learns nothing from being looked up."""
    steps = three_steps()
    for micro_batches in steps:
        micro_batches[0].ids_BS[0, 2] = PAD
    return steps


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), {"padding": with_padding_inside})


@pytest.fixture(scope="module")
def sequence_models(tmp_path_factory: pytest.TempPathFactory) -> SequenceModels:
    return SequenceModels(tmp_path_factory.mktemp("sequences"))


def check(plan: Plan, decoder: Decoder, weights: Weights, plain: PlainRun, steps: Steps, **how: Any) -> None:
    assert any(table in name for table in EMBEDDINGS for name in plain.initial)
    alone = len(plan.devices) == 1
    mine, *others = check_alike(
        plan, decoder, weights, plain, steps, adapter=None, train_embeddings=True, messages=not alone, **how
    )
    if plan.strategy in ("pipeline", "data"):
        for theirs in others:
            assert all(torch.equal(theirs[name], mine[name]) for name in theirs.keys() & mine.keys()), "bit-equal"


def check_decoder(models: Models, family: str, plan: Plan, *, tied: bool = True, **how: Any) -> None:
    plain = models.plain(family, tied, None, "padding", embeddings=True)
    decoder = decoder_of(config(family, tie_word_embeddings=tied))
    check(plan, decoder, models.checkpoint(family, tied), plain, with_padding_inside(), **how)


WIDE: dict[str, Counts] = {
    "1": ([9], [26], [61]),
    "2": ([0, 9], [26, 0], [1, 60]),
    "3": ([5, 3, 1], [13, 9, 4], [31, 20, 10]),
    "4": ([4, 0, 4, 1], [10, 8, 0, 8], [20, 21, 20, 0]),
}
NARROW: dict[str, Counts] = {
    "1": ([4], [26], [61]),
    "2": ([3, 1], [20, 6], [0, 61]),
    "3": ([2, 0, 2], [0, 14, 12], [31, 20, 10]),
    "4": ([1, 1, 1, 1], [7, 7, 6, 6], [20, 1, 20, 20]),
}
FAMILIES = ["llama", "gemma2", "gpt2", "gpt_neox", "opt", "olmo2"]
"""Plain, scaled and soft-capped, with learned positions, with parallel residuals, with norms over all heads."""
PAIRS = [
    # world, tied, halves, recompute
    ("1", True, 2, False),
    ("1", False, 1, True),
    ("2", True, 1, True),
    ("2", False, 2, False),
    ("3", True, 2, True),
    ("3", False, 1, False),
    ("4", True, 2, False),
    ("4", False, 2, True),
]


@pytest.mark.parametrize(("world", "tied", "half_batches", "checkpointing"), PAIRS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_tensor(models: Models, family: str, world: str, tied: bool, half_batches: int, checkpointing: bool) -> None:
    counts = (NARROW if family.startswith("gemma") else WIDE)[world]
    plan = tensor_plan(*counts)
    check_decoder(models, family, plan, tied=tied, half_batches=half_batches, checkpointing=checkpointing)


@pytest.mark.parametrize("owners", [(1, 0), (2,)], ids=str)
def test_a_tied_table_has_owners_in_turn(models: Models, owners: tuple[int, ...]) -> None:
    check_decoder(models, "gpt2", tensor_plan(*WIDE["3"]), owners=owners)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_pipeline(models: Models, family: str, tied: bool) -> None:
    decoder = decoder_of(config(family))
    check_decoder(models, family, pipeline_plan(decoder, [(1, 1), (0, 3)]), tied=tied)
    stages = [(2, 1), (0, 1), (1, 2)]
    check_decoder(models, family, pipeline_plan(decoder, stages), tied=tied, checkpointing=True, owners=(1, 0))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_data(models: Models, family: str, tied: bool) -> None:
    decoder = decoder_of(config(family))
    check_decoder(models, family, data_plan(decoder, [1.42, 1.0]), tied=tied)
    check_decoder(models, family, data_plan(decoder, [1.0, 2.0, 1.0]), tied=tied, owners=(2, 0))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "roberta"])
def test_under_a_head_of_sequences(sequence_models: SequenceModels, family: str) -> None:
    cfg = tiny_config(family)
    decoder, plain = description(cfg), sequence_models.plain(family, "classes", None, embeddings=True)
    plans = [
        tensor_plan([9], [26], [0]),
        tensor_plan([0, 9], [26, 0], [0, 0]),
        tensor_plan([5, 3, 1], [13, 9, 4], [0, 0, 0]),
        pipeline_plan(decoder, [(1, 1), (0, 3)]),
        data_plan(decoder, [1.0, 2.0]),
    ]
    for plan in plans:
        check(plan, decoder, sequence_models.checkpoint(family), plain, sequence_steps(cfg))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_ids_stay_with_the_owner_of_an_untied_table(models: Models, tied: bool) -> None:
    steps = [[batch((14, 11, 10), 10 * s), batch((12, 9), 10 * s + 1)] for s in range(2)]
    plan, decoder = tensor_plan(*WIDE["3"]), decoder_of(config("llama", tie_word_embeddings=tied))
    heard: list[list[tuple[str, Tensor]]] = [[], [], []]
    weights = models.checkpoint("llama", tied)

    def body(comm: Comm) -> None:
        part = part_for(
            plan, comm.rank, weights, decoder, compute=torch.float32, adapter=None, seed=0, train_embeddings=True
        )
        assert isinstance(part.embedding, TrainedEmbedding)
        stepper = Stepper(part, comm, Settings(steps=2, learning_rate=1e-2))
        for batches in steps:
            stepper.step(turns_of(batches, (0,), comm.rank))

    run_world(3, body, listener=lambda rank: lambda kind, content: heard[rank].append((kind, content.clone())))
    known = secrets([each for batches in steps for each in batches])
    messages = [content for of_rank in heard for _, content in of_rank]
    assert any(leaks(content, known, VOCAB) for content in messages if content.is_floating_point()) is False
    whole_numbers = [content for content in messages if not content.is_floating_point()]
    if tied:
        assert any(leaks(content, known, VOCAB) for content in whole_numbers), "they go to who has the rows"
        return
    assert len(whole_numbers) == 2 * len(steps)
    for size, content, batches in zip(whole_numbers[::2], whole_numbers[1::2], steps, strict=True):
        assert size.tolist() == [content.numel()]
        assert decode_layouts(content) == [each.layout for each in batches]


@pytest.mark.parametrize("name", ["tensor", "pipeline", "data"])
def test_low_precision_is_near_and_keeps_exact_tables(models: Models, name: str) -> None:
    decoder = decoder_of(config("gemma2", tie_word_embeddings=True))
    plans = {
        "tensor": tensor_plan(*NARROW["3"]),
        "pipeline": pipeline_plan(decoder, [(1, 1), (0, 3)]),
        "data": data_plan(decoder, [1.0, 2.0]),
    }
    plan, weights = plans[name], models.checkpoint("gemma2", True)

    def losses(compute: torch.dtype) -> list[float]:
        def body(comm: Comm) -> list[float]:
            part = part_for(
                plan, comm.rank, weights, decoder, compute=compute, adapter=None, seed=0, train_embeddings=True
            )
            settings = Settings(steps=3, learning_rate=1e-3, schedule="constant", clip=CLIP)
            stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
            assert {t.local.dtype for t in part.chain.trained} == {torch.promote_types(compute, torch.float32)}
            return [stepper.step(turns_of(batches, (0,), comm.rank)).loss for batches in three_steps()]

        return run_world(len(plan.devices), body, wire=compute)[0]

    assert losses(torch.bfloat16) == pytest.approx(losses(torch.float64), rel=0.05)
