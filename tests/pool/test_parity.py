"""Any uneven plan trains exactly as the plain single-process model: loss, gradients, weights, in float64."""

from collections.abc import Sequence

import pytest

from pool.alike import STEPS, Counts, check_family, tensor_plan
from pool.parity_models import Models
from pool.tiny import FAMILIES, config
from potluck.models.families import decoder_of
from potluck.models.families.decoder import Names

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

LLAMA_WORLDS: dict[str, Counts] = {
    "1": ([9], [26], [61]),
    "2: 5/4": ([5, 4], [15, 11], [40, 21]),
    "2: all heads on one": ([0, 9], [26, 0], [61, 0]),
    "3: 5/3/1": ([5, 3, 1], [13, 9, 4], [31, 20, 10]),
    "3: empty shares": ([4, 0, 5], [0, 20, 6], [30, 31, 0]),
    "4: fewer kv heads than devices": ([4, 2, 2, 1], [10, 8, 7, 1], [20, 20, 20, 1]),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), STEPS)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("half_batches", [1, 2])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", [None, ["all-linear"], *[[name] for name in LINEARS]], ids=str)
@pytest.mark.parametrize("world", LLAMA_WORLDS)
def test_llama(
    models: Models, world: str, targets: list[str] | None, tied: bool, half_batches: int, checkpointing: bool
) -> None:
    check_family(
        models,
        "llama",
        tensor_plan(*LLAMA_WORLDS[world]),
        targets=targets,
        tied=tied,
        half_batches=half_batches,
        checkpointing=checkpointing,
    )


WIDE: dict[str, Counts] = {
    "1": ([9], [26], [61]),
    "2": ([0, 9], [26, 0], [1, 60]),
    "3": ([5, 3, 1], [13, 9, 4], [31, 20, 10]),
    "4": ([4, 0, 4, 1], [10, 8, 0, 8], [20, 21, 20, 0]),
}
NARROW: dict[str, Counts] = {
    "1": ([4], [26], [61]),
    "2": ([3, 1], [20, 6], [61, 0]),
    "3": ([2, 0, 2], [0, 14, 12], [31, 20, 10]),
    "4": ([1, 1, 1, 1], [7, 7, 6, 6], [20, 1, 20, 20]),
}
PAIRS = [
    # world, targets, tied, halves, recompute
    ("1", None, True, 1, True),
    ("1", ["all-linear"], False, 2, False),
    ("2", ["all-linear"], True, 1, False),
    ("2", None, False, 2, True),
    ("3", ["all-linear"], True, 2, True),
    ("3", None, False, 1, False),
    ("3", ["q_proj", "o_proj"], True, 2, False),
    ("4", None, True, 2, False),
    ("4", ["k_proj", "v_proj"], False, 2, False),
    ("4", ["layers.1.mlp.up_proj", "layers.1.mlp.down_proj"], True, 1, True),
]


@pytest.mark.parametrize(("world", "targets", "tied", "half_batches", "checkpointing"), PAIRS, ids=str)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_families(
    models: Models,
    family: str,
    world: str,
    targets: list[str] | None,
    tied: bool,
    half_batches: int,
    checkpointing: bool,
) -> None:
    counts = (NARROW if family.startswith("gemma") else WIDE)[world]
    targets = None if targets is None else named(family, targets)
    check_family(
        models,
        family,
        tensor_plan(*counts),
        targets=targets,
        tied=tied,
        half_batches=half_batches,
        checkpointing=checkpointing,
    )


def named(family: str, targets: Sequence[str]) -> list[str]:
    """Llama's names as the family's own."""
    names, llama = decoder_of(config(family)).names, Names()
    own = dict(zip((*llama.qkv, *llama.into), (*(names.qkv * 3)[:3], *names.into * 2), strict=False))
    own |= {llama.o: names.o, llama.out: names.out}
    short = {key.rpartition(".")[2]: value.rpartition(".")[2] for key, value in own.items()}
    full = {f"layers.1.{key}": f"{names.blocks}.1.{value}" for key, value in own.items()}
    return list(dict.fromkeys((short | full | {"all-linear": "all-linear"})[target] for target in targets))


@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_single_walks_without_messages(models: Models, family: str, targets: list[str] | None) -> None:
    counts = (NARROW if family == "gemma3" else WIDE)["1"]
    check_family(models, family, tensor_plan(*counts), targets=targets, half_batches=1, messages=False)


@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("world", "owners"), [("2", (1, 0)), ("3", (0, 2)), ("4", (1, 3))], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_owners_in_turn_are_one_owner_of_it_all(
    models: Models, family: str, world: str, owners: tuple[int, ...], tied: bool, targets: list[str] | None
) -> None:
    counts = (NARROW if family == "gemma3" else WIDE)[world]
    check_family(models, family, tensor_plan(*counts), targets=targets, tied=tied, owners=owners)
