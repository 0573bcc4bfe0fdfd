"""With its first blocks frozen, a model trains as the plain one of which these are not trained, by every strategy."""

from typing import Any

import pytest
import torch

from pool.alike import STEPS, check_family, data_plan, pipeline_plan, tensor_plan
from pool.parity_models import Models
from pool.sequences import SequenceModels, description
from pool.sequences import tiny_config as sequence_config
from pool.test_sequences import check_parity as check_sequences
from pool.tiny import config
from potluck.chain.comm import Comm
from potluck.chain.piece import At
from potluck.chain.walk import backward, forward
from potluck.errors import BadInput
from potluck.job import Job
from potluck.job_sections import Lora
from potluck.models.families import decoder_for, decoder_of, with_frozen
from potluck.pool.plan import Plan
from potluck.pool.strategies.build import part_for
from worlds import run_world


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), STEPS)


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory: pytest.TempPathFactory) -> SequenceModels:
    return SequenceModels(tmp_path_factory.mktemp("classifiers"))


TENSOR: dict[str, Plan] = {
    "1": tensor_plan([9], [26], [61]),
    "2": tensor_plan([0, 9], [26, 0], [1, 60]),
    "3": tensor_plan([5, 3, 1], [13, 9, 4], [31, 20, 10]),
    "4": tensor_plan([4, 0, 4, 1], [10, 8, 0, 8], [20, 21, 20, 0]),
}
TARGETS = pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=["full", "lora"])


@TARGETS
@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("world", TENSOR)
def test_tensor(models: Models, world: str, checkpointing: bool, targets: list[str] | None) -> None:
    halves = 1 + checkpointing
    check_family(
        models,
        "llama",
        TENSOR[world],
        targets=targets,
        frozen_blocks=1,
        half_batches=halves,
        checkpointing=checkpointing,
    )


@TARGETS
@pytest.mark.parametrize("family", ["llama-biased", "qwen3", "gpt2", "gpt_neox", "olmo2", "opt", "phi3", "stablelm"])
def test_families(models: Models, family: str, targets: list[str] | None) -> None:
    check_family(models, family, TENSOR["3"], targets=targets, frozen_blocks=1)


@pytest.mark.parametrize("target", ["q_proj", "down_proj"])
def test_targets_found_in_frozen_blocks_too(models: Models, target: str) -> None:
    check_family(models, "llama", TENSOR["2"], targets=[target], frozen_blocks=1)


@TARGETS
def test_single_walks_without_messages(models: Models, targets: list[str] | None) -> None:
    check_family(models, "llama", TENSOR["1"], targets=targets, frozen_blocks=1, messages=False)


@TARGETS
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_data(models: Models, family: str, targets: list[str] | None) -> None:
    check_family(
        models, family, data_plan(decoder_of(config(family)), [1.0, 2.0, 1.0]), targets=targets, frozen_blocks=1
    )


STAGES = {
    "2: 1/3": [(0, 1), (1, 3)],
    "2: 2/2": [(1, 2), (0, 2)],
    "3: 1/2/1": [(2, 1), (0, 2), (1, 1)],
    "4": [(3, 1), (1, 1), (0, 1), (2, 1)],
}


@TARGETS
@pytest.mark.parametrize("world", STAGES)
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_pipeline(models: Models, family: str, world: str, targets: list[str] | None) -> None:
    plan = pipeline_plan(decoder_of(config(family)), STAGES[world])
    check_family(models, family, plan, targets=targets, frozen_blocks=1, steps="many", checkpointing=world == "4")


OF_SEQUENCES: dict[str, Plan] = {
    "1": tensor_plan([9], [26], [0]),
    "3": tensor_plan([5, 3, 1], [13, 9, 4], [0, 0, 0]),
    "data": data_plan(description(sequence_config("llama")), [1.0, 2.0]),
    "stages": pipeline_plan(description(sequence_config("llama")), [(2, 1), (0, 1), (1, 2)]),
}


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("plan", OF_SEQUENCES)
@pytest.mark.parametrize("family", ["llama", "bert", "roberta"])
def test_classifiers(classifiers: SequenceModels, family: str, plan: str, lora: bool) -> None:
    check_sequences(classifiers, family, OF_SEQUENCES[plan], lora=lora, frozen_blocks=1)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("plan", OF_SEQUENCES)
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_a_head_alone(classifiers: SequenceModels, family: str, plan: str, lora: bool) -> None:
    check_sequences(classifiers, family, OF_SEQUENCES[plan], lora=lora, frozen_blocks=2)


def test_a_head_alone_of_several_owners_without_messages_and_recomputed(classifiers: SequenceModels) -> None:
    check_sequences(classifiers, "roberta", OF_SEQUENCES["3"], frozen_blocks=2, owners=(2, 0))
    check_sequences(classifiers, "bert", OF_SEQUENCES["1"], frozen_blocks=2, messages=False)
    check_sequences(classifiers, "bert", OF_SEQUENCES["stages"], frozen_blocks=2, checkpointing=True)


def job(**fields: Any) -> Job:
    return Job.model_validate({"model": "m", "data": {"train": "d"}, "output": "o", **fields})


@pytest.mark.parametrize(("blocks", "task"), [(2, "causal-lm"), (7, "causal-lm"), (3, "sequence-classification")])
def test_more_blocks_than_can_be_frozen(blocks: int, task: str) -> None:
    cfg = sequence_config("llama")
    with pytest.raises(BadInput, match=f"frozen_blocks is {blocks}, but the model has 2 blocks"):
        decoder_for(cfg, job(frozen_blocks=blocks, task=task))
    assert decoder_for(cfg, job(frozen_blocks=2, task="sequence-classification")).linears == []


@pytest.mark.parametrize("fields", [{"frozen_blocks": -1}, {"frozen_blocks": 1, "split": {}}], ids=str)
def test_refused_in_a_job(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="frozen_blocks"):
        job(**fields)


def test_targets_in_frozen_blocks_only(models: Models) -> None:
    decoder = with_frozen(decoder_of(config("llama", tie_word_embeddings=True)), 1)
    for target in ("layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"):
        lora = Lora(targets=["down_proj", target])
        with pytest.raises(BadInput, match=f"'{target}' matches linears of frozen blocks only"):
            part_for(TENSOR["1"], 0, models.checkpoint("llama"), decoder, compute=torch.float32, adapter=lora, seed=0)


@TARGETS
def test_frozen_weights_stay_in_the_compute_dtype(models: Models, targets: list[str] | None) -> None:
    lora = None if targets is None else Lora(rank=1)
    sizes = []
    for blocks in (0, 1):
        decoder = with_frozen(decoder_of(config("llama", tie_word_embeddings=True)), blocks)
        part = part_for(
            TENSOR["1"], 0, models.checkpoint("llama"), decoder, compute=torch.bfloat16, adapter=lora, seed=0
        )
        sizes.append(part.weight_bytes - sum(t.local.nbytes for t in part.chain.trained))
        assert not any(t.name.startswith("model.layers.0.") for t in part.chain.trained) or not blocks
        assert part.chain.lowest_trained == 2 * blocks
    block = sum(
        torch.Size(models.checkpoint("llama").shape(name)).numel()
        for name in models.checkpoint("llama").names
        if name.startswith("model.layers.0.")
    )
    assert sizes[1] - sizes[0] == (2 * block if lora is None else 0)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@TARGETS
def test_nothing_is_kept_or_sent_back_below(models: Models, targets: list[str] | None, checkpointing: bool) -> None:
    lora = None if targets is None else Lora(rank=1)

    def body(comm: Comm) -> int:
        decoder = with_frozen(decoder_of(config("llama", tie_word_embeddings=True)), 1)
        part = part_for(
            TENSOR["2"], comm.rank, models.checkpoint("llama"), decoder, compute=torch.float32, adapter=lora, seed=0
        )
        x_BSD = torch.randn(2, 5, 45)
        kept_N = torch.arange(10)
        hidden, (tape,) = forward(part.chain, [x_BSD], [kept_N], [At(0, 0, 0, 0)], comm, checkpointing=checkpointing)
        assert len(tape.visits) == 2
        before = comm.clocks.bytes_sent
        backward(part.chain, [tape], hidden, comm)
        return (comm.clocks.bytes_sent - before) // x_BSD.nbytes

    # between the head and the lowest trained piece: two links, of which adapters need no gradient below the lowest one
    assert run_world(2, body) == [1 if lora else 2] * 2
