"""rsLoRA, DoRA and (IA)^3 train exactly as in stock peft, however they are cut: loss, gradients, weights, float64."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from pool.adapters import BOTH, DORA, RSLORA, as_ours, columns, in_peft, lora
from pool.alike import check_alike, data_plan, pipeline_plan, tensor_plan, whole_of
from pool.parity_models import CLIP, LEARNING_RATE
from pool.plain import PlainRun, exact_norms, plain_run
from pool.tiny import FAMILIES, config, save_tiny, three_steps
from potluck.errors import BadInput
from potluck.job_sections import IA3, Adapter
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.strategies.build import part_for

Plans = Callable[[str], Plan]
Run = tuple[Path, PlainRun]


def tensor(*counts: list[int]) -> Plans:
    return lambda family: tensor_plan(*counts)


def pipeline(family: str) -> Plan:
    decoder = decoder_of(config(family))
    first = 2 if decoder.parallel else 1
    return pipeline_plan(decoder, [(1, first), (0, 4 - first)])


def data(family: str) -> Plan:
    return data_plan(decoder_of(config(family)), [2.0, 1.0])


def single(family: str) -> Plan:
    return Plan("single", (DeviceShare("d0", *whole_of(decoder_of(config(family)))),))


WIDE: dict[str, Plans] = {
    "2: nothing of attention on one": tensor([0, 9], [26, 0], [1, 60]),
    "3: shared key/value heads": tensor([5, 3, 1], [13, 9, 4], [31, 20, 10]),
    "4: empty shares": tensor([4, 0, 4, 1], [10, 8, 0, 8], [20, 21, 20, 0]),
}
NARROW: dict[str, Plans] = {
    "2: nothing of attention on one": tensor([0, 4], [26, 0], [1, 60]),
    "3: shared key/value heads": tensor([2, 1, 1], [13, 9, 4], [31, 20, 10]),
    "4: empty shares": tensor([2, 0, 1, 1], [10, 8, 0, 8], [20, 21, 20, 0]),
}
WHOLE: dict[str, Plans] = {"single": single, "pipeline": pipeline, "data": data}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool, Any, Any], Run]:
    @cache
    def model(family: str, tied: bool) -> Path:
        return save_tiny(config(family, tie_word_embeddings=tied), tmp_path_factory.mktemp("model"))

    @cache
    def run(family: str, tied: bool, kind: type[Adapter], fields: str) -> Run:
        adapter = kind.model_validate_json(fields)
        with exact_norms():
            found = plain_run(
                model(family, tied),
                three_steps(),
                targets=None,
                adapter=in_peft(adapter, family),
                learning_rate=LEARNING_RATE,
                clip=CLIP,
            )
        return model(family, tied), as_ours(found)

    return run


def check_parity(
    runs: Callable[..., Run], family: str, plans: Plans, adapter: Adapter, *, tied: bool = True, **settings: Any
) -> None:
    directory, plain = runs(family, tied, type(adapter), adapter.model_dump_json())
    plan, decoder = plans(family), decoder_of(config(family, tie_word_embeddings=tied))
    with Checkpoint.open(directory) as checkpoint:
        alone = plan.strategy == "single"
        check_alike(plan, decoder, checkpoint, plain, three_steps(), adapter=adapter, messages=not alone, **settings)
    far_apart = [name for name in plain.initial if (plain.weights[name] - plain.initial[name]).abs().max() > 1e-3]
    assert set(far_apart) == set(plain.initial)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["rslora", "dora", "ia3"])
def test_cut_by_units(runs: Callable[..., Run], family: str, kind: str) -> None:
    """Pairwise: each family with each kind, shares and the rest in turn."""
    worlds = NARROW if family.startswith("gemma") else WIDE
    turn = FAMILIES.index(family) + ["rslora", "dora", "ia3"].index(kind)
    plans = list(worlds.values())[turn % 3]
    adapters: dict[str, Adapter] = {
        "rslora": lora(**RSLORA),
        "dora": lora(columns(family), **(BOTH if turn % 2 else DORA)),
        "ia3": IA3() if turn % 2 else IA3(targets=["all-linear"]),
    }
    check_parity(
        runs,
        family,
        plans,
        adapters[kind],
        tied=bool(turn % 4 < 2),
        half_batches=1 + turn % 2,
        checkpointing=bool(turn % 3 == 0),
    )


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("half_batches", [1, 2])
@pytest.mark.parametrize("targets", [["all columns"], ["v_proj"], ["q_proj", "up_proj"]], ids=str)
@pytest.mark.parametrize("world", WIDE)
def test_dora_of_llama(
    runs: Callable[..., Run], world: str, targets: list[str], half_batches: int, checkpointing: bool
) -> None:
    adapter = lora(columns("llama") if targets == ["all columns"] else targets, **DORA)
    check_parity(runs, "llama", WIDE[world], adapter, half_batches=half_batches, checkpointing=checkpointing)


@pytest.mark.parametrize("targets", [["auto"], ["all-linear"]], ids=str)
@pytest.mark.parametrize("family", ["llama-biased", "qwen2", "phi3"])
@pytest.mark.parametrize("world", WIDE)
def test_vectors_of_fused_and_biased_linears(
    runs: Callable[..., Run], world: str, family: str, targets: list[str]
) -> None:
    check_parity(runs, family, WIDE[world], IA3(targets=targets), tied=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["dora", "ia3"])
def test_whole_linears(runs: Callable[..., Run], family: str, kind: str) -> None:
    """Where each device has whole linears DoRA is exact for all of them."""
    turn = FAMILIES.index(family) + (kind == "dora")
    plans = list(WHOLE.values())[turn % 3]
    adapter = lora(**DORA) if kind == "dora" else IA3()
    settings = {"half_batches": 1} if plans is single else {}
    check_parity(runs, family, plans, adapter, checkpointing=bool(turn % 2), **settings)


@pytest.mark.parametrize("plans", WHOLE.values(), ids=WHOLE)
@pytest.mark.parametrize("variant", [DORA, BOTH], ids=str)
def test_dora_of_all_linears_of_llama(runs: Callable[..., Run], plans: Plans, variant: dict[str, bool]) -> None:
    check_parity(runs, "llama-biased", plans, lora(**variant), tied=False)


def test_dora_of_divided_rows_is_refused_where_parts_are_built(runs: Callable[..., Run]) -> None:
    directory, _ = runs("llama", True, IA3, IA3().model_dump_json())
    plan, decoder = WIDE["3: shared key/value heads"]("llama"), decoder_of(config("llama"))
    with Checkpoint.open(directory) as checkpoint, pytest.raises(BadInput, match=r"every row of o_proj and down_proj"):
        part_for(plan, 0, checkpoint, decoder, compute=torch.float64, adapter=lora(**DORA), seed=0)
