"""Lion as its paper has it, on any cut of a model, in float64."""

import pytest

from pool.alike import STEPS, check_family, data_plan, pipeline_plan, tensor_plan
from pool.parity_models import Models
from pool.tiny import config
from potluck.models.families import decoder_of

OPTIMIZERS = pytest.mark.parametrize("optimizer", ["lion", "adamw"])
TARGETS = pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=["full", "lora"])
DECAY = 0.3


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), STEPS)


WORLDS = {
    "1": ([9], [26], [61]),
    "2": ([0, 9], [26, 0], [1, 60]),
    "3": ([5, 3, 1], [13, 9, 4], [31, 20, 10]),
    "4": ([4, 2, 2, 1], [10, 8, 7, 1], [20, 20, 20, 1]),
}


@OPTIMIZERS
@TARGETS
@pytest.mark.parametrize("world", WORLDS)
def test_tensor(models: Models, world: str, targets: list[str] | None, optimizer: str) -> None:
    plan = tensor_plan(*WORLDS[world])
    check_family(models, "llama", plan, targets=targets, optimizer=optimizer, weight_decay=DECAY)


@TARGETS
def test_data(models: Models, targets: list[str] | None) -> None:
    plan = data_plan(decoder_of(config("llama")), [1.0, 2.0, 1.0])
    check_family(models, "llama", plan, targets=targets, optimizer="lion", weight_decay=DECAY)


@TARGETS
def test_pipeline(models: Models, targets: list[str] | None) -> None:
    plan = pipeline_plan(decoder_of(config("llama")), [(2, 1), (0, 2), (1, 1)])
    check_family(
        models, "llama", plan, targets=targets, steps="many", frozen_blocks=1, optimizer="lion", weight_decay=DECAY
    )
