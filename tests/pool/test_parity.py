"""Any uneven plan trains exactly as the plain single-process model: loss, gradients, weights, in float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from pool.parity_models import CLIP, LEARNING_RATE, Models, far
from pool.tiny import FAMILIES, config, shares, three_steps
from potluck.chain.comm import Comm
from potluck.chain.share import Share
from potluck.chain.trained import Trained
from potluck.job_sections import Lora
from potluck.models.build import build_part
from potluck.models.families import decoder_of
from potluck.models.families.decoder import Names
from potluck.pool.gradients import unequal
from potluck.pool.step import OWNER, Settings, Stepper
from potluck.pool.turns import Turn
from worlds import run_world

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

Counts = tuple[list[int], list[int], list[int]]

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
    return Models(tmp_path_factory.mktemp("models"), {"three": three_steps})


def local_part(trained: Trained, whole: Tensor, rank: int) -> Tensor:
    if trained.dim is None:
        return whole
    return whole.index_select(trained.dim, torch.tensor(list(trained.held[rank]), dtype=torch.long))


def check_parity(
    models: Models,
    family: str,
    counts: Counts,
    *,
    targets: Sequence[str] | None = ("all-linear",),
    tied: bool = True,
    half_batches: int = 2,
    checkpointing: bool = False,
    messages: bool = True,
    owners: Sequence[int] = (OWNER,),
) -> None:
    plain = models.plain(family, tied, None if targets is None else tuple(targets), "three")
    cfg = config(family, tie_word_embeddings=tied)
    plan: list[Share] = shares(cfg, *counts)
    lora = None if targets is None else Lora(rank=4, alpha=8, targets=list(targets))
    settings = Settings(
        steps=3,
        learning_rate=LEARNING_RATE,
        schedule="constant",
        clip=CLIP,
        half_batches=half_batches,
        checkpointing=checkpointing,
    )
    checkpoint = models.checkpoint(family, tied)

    def body(comm: Comm) -> None:
        part = build_part(checkpoint, decoder_of(cfg), plan, comm.rank, compute=torch.float64, adapter=lora, seed=0)
        trained = part.chain.trained
        assert {t.name for t in trained} == set(plain.initial)
        for t in trained:
            t.local.detach().copy_(local_part(t, plain.initial[t.name], comm.rank))
        stepper = Stepper(part, comm, settings)
        for step, batches in enumerate(three_steps()):
            dealt = [(owners[i % len(owners)], batches[i :: len(owners)]) for i in range(len(owners))]
            found = stepper.accumulate([Turn(owner, own if comm.rank == owner else None) for owner, own in dealt])
            assert found.owned_targets == tuple(
                sum(each.targets_N.numel() for owner, own in dealt if owner == rank for each in own)
                for rank in range(comm.world_size)
            )
            assert abs(found.loss - plain.losses[step]) < 1e-9
            if step == 0:
                for t in trained:
                    assert t.local.grad is not None
                    assert far(t.local.grad, local_part(t, plain.gradients[t.name], comm.rank)) < 1e-9, t.name
            stepper.update(found.norm, LEARNING_RATE)
        for t in trained:
            assert far(t.local.detach(), local_part(t, plain.weights[t.name], comm.rank)) < 1e-9, t.name
        assert list(unequal(stepper.held, comm)) == []

    if messages:
        run_world(len(plan), body)
    else:
        body(Comm())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("half_batches", [1, 2])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", [None, ["all-linear"], *[[name] for name in LINEARS]], ids=str)
@pytest.mark.parametrize("world", LLAMA_WORLDS)
def test_llama(
    models: Models, world: str, targets: list[str] | None, tied: bool, half_batches: int, checkpointing: bool
) -> None:
    check_parity(
        models,
        "llama",
        LLAMA_WORLDS[world],
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
    check_parity(
        models, family, counts, targets=targets, tied=tied, half_batches=half_batches, checkpointing=checkpointing
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
    check_parity(models, family, counts, targets=targets, half_batches=1, messages=False)


@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("world", "owners"), [("2", (1, 0)), ("3", (0, 2)), ("4", (1, 3))], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_owners_in_turn_are_one_owner_of_it_all(
    models: Models, family: str, world: str, owners: tuple[int, ...], tied: bool, targets: list[str] | None
) -> None:
    counts = (NARROW if family == "gemma3" else WIDE)[world]
    check_parity(models, family, counts, targets=targets, tied=tied, owners=owners)
