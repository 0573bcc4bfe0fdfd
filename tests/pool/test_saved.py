"""What a pool saves is what it trained: stock peft and stock transformers load it strictly and compute the same."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftConfig, PeftModel, get_peft_model, load_peft_weights, set_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from pool.plain import TABLES, exact_norms
from pool.tiny import batch, config, save_tiny, shares, three_steps
from potluck.chain.comm import Comm
from potluck.job import Job
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_for, decoder_of
from potluck.models.merge import merge
from potluck.pool.gather import gather_whole
from potluck.pool.step import OWNER, Stepper
from potluck.pool.trainer import save, settings_of
from potluck.pool.turns import Turn
from worlds import run_world

HEADS = {
    "llama": {1: [9], 3: [5, 3, 1]},
    "qwen3": {1: [9], 3: [4, 0, 5]},
    "gemma3": {1: [4], 3: [2, 1, 1]},
    "gpt2": {1: [9], 3: [5, 3, 1]},
    "gpt_neox": {1: [9], 3: [4, 0, 5]},
    "opt": {1: [9], 3: [5, 3, 1]},
    "phi3": {1: [9], 3: [5, 3, 1]},
}
COLUMNS = {1: [26], 3: [13, 9, 4]}
ROWS = {1: [61], 3: [31, 30, 0]}
UNSEEN = batch((9, 7, 5), 77)
"""Not trained on; the pool and what it saved must have the same loss on it."""


@pytest.fixture(autouse=True)
def _exact() -> Iterator[None]:
    with exact_norms():
        yield


@dataclass
class Saved:
    base: Path
    result: Path
    trained: dict[str, Tensor]
    loss: float
    """Of the pool's own model after training, on ``UNSEEN``."""


def train_and_save(tmp_path: Path, cfg: PretrainedConfig, world: int, dtype: torch.dtype, **fields: Any) -> Saved:
    base, result = tmp_path / "base", tmp_path / "result"
    save_tiny(cfg, base)
    result.mkdir()
    job = Job.model_validate(
        {
            "model": str(base),
            "data": {"train": "unused"},
            "output": tmp_path / "out",
            "learning_rate": 0.05,
            "steps": 2,
            **fields,
        }
    )
    decoder = decoder_for(cfg, job)
    plan = shares(cfg, HEADS[cfg.model_type.removesuffix("_text")][world], COLUMNS[world], ROWS[world])

    def body(comm: Comm) -> tuple[dict[str, Tensor], float]:
        with Checkpoint.open(base) as checkpoint:
            part = build_part(checkpoint, decoder, plan, comm.rank, compute=dtype, adapter=job.adapter, seed=job.seed)
            stepper = Stepper(part, comm, settings_of(job, 2))
            for batches in three_steps()[:2]:
                stepper.step([Turn(OWNER, batches if comm.rank == OWNER else None)])
            trained = {name: tensor.clone() for name, tensor in gather_whole(part.chain.trained, comm)}
            save(job, stepper.strategy.whole(), comm.rank, checkpoint, decoder, base, result)
            return trained, stepper.accumulate([Turn(OWNER, [UNSEEN] if comm.rank == OWNER else None)]).loss

    trained, loss = run_world(world, body, wire=dtype)[0]
    return Saved(base, result, trained, loss)


def stock(directory: Path) -> Any:
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def logits(model: Any) -> Tensor:
    lengths_B = torch.tensor(UNSEEN.layout.lengths)
    mask_BS = (torch.arange(UNSEEN.ids_BS.shape[1]) < lengths_B[:, None]).long()
    with torch.no_grad():
        found: Tensor = model(input_ids=UNSEEN.ids_BS, attention_mask=mask_BS).logits[mask_BS.bool()]
    return found


def loss_of(logits_TV: Tensor) -> float:
    first, chosen = 0, []
    for length, positions in zip(UNSEEN.layout.lengths, UNSEEN.layout.positions, strict=True):
        chosen += [first + position for position in positions]
        first += length
    return float(F.cross_entropy(logits_TV[chosen], UNSEEN.targets_N))


def with_tensors_put_in(base: Path, trained: dict[str, Tensor], scale: float) -> Any:
    """The plain model whose weights have the trained tensors added, without any adapter library."""
    model = stock(base)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, a_RI in trained.items():
            linear, suffix, _ = name.partition(".lora_A.weight")
            if suffix:
                b_OR = trained[f"{linear}.lora_B.weight"]
                delta_OI = scale * b_OR.double() @ a_RI.double()
                weights[f"{linear}.weight"].add_(delta_OI.T if "transformer.h." in name else delta_OI)
    return model


def strictly_loaded(saved: Saved) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # peft asks transformers for it
        adapted = get_peft_model(stock(saved.base), PeftConfig.from_pretrained(saved.result))
        outcome = set_peft_model_state_dict(adapted, load_peft_weights(str(saved.result), device="cpu"))
        assert [key for key in outcome.missing_keys if "lora" in key or "ia3" in key] == []
        assert outcome.unexpected_keys == []
        return PeftModel.from_pretrained(stock(saved.base), saved.result).eval()


CASES = [
    # family, world, tied, dtype
    ("llama", 1, True, torch.float64),
    ("llama", 3, True, torch.float32),
    ("llama", 3, False, torch.float64),
    ("qwen3", 1, False, torch.float32),
    ("qwen3", 3, True, torch.float64),
    ("gemma3", 1, True, torch.float32),
    ("gemma3", 3, True, torch.float64),
    ("gemma3", 3, False, torch.float32),
    ("gpt2", 1, True, torch.float32),
    ("gpt2", 3, True, torch.float64),
    ("gpt_neox", 3, False, torch.float64),
    ("opt", 3, True, torch.float64),
    ("phi3", 3, False, torch.float64),
]


@pytest.mark.parametrize(("family", "world", "tied", "dtype"), CASES, ids=str)
def test_an_adapter(tmp_path: Path, family: str, world: int, tied: bool, dtype: torch.dtype) -> None:
    cfg = config(family, tie_word_embeddings=tied)
    saved = train_and_save(tmp_path, cfg, world, dtype, lora={"rank": 4, "alpha": 6})
    expected = logits(with_tensors_put_in(saved.base, saved.trained, scale=6 / 4))
    before = logits(stock(saved.base))
    assert (expected - before).abs().max() > 0.05, "training must have changed something to compare"

    adapted = logits(strictly_loaded(saved))
    assert (adapted - expected).abs().max() < 1e-9
    assert abs(loss_of(adapted) - saved.loss) < (1e-9 if dtype == torch.float64 else 1e-5)
    assert abs(loss_of(before) - saved.loss) > 1e-3

    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    assert (logits(stock(tmp_path / "merged")) - adapted).abs().max() < 1e-9


KINDS: dict[str, dict[str, Any]] = {
    "rslora": {"lora": {"rank": 4, "alpha": 6, "use_rslora": True}},
    "dora": {"lora": {"rank": 4, "alpha": 6, "use_dora": True, "use_rslora": True}},
    "ia3": {"train": "ia3"},
    "ia3 everywhere": {"train": "ia3", "ia3": {"targets": ["all-linear"]}},
    "ia3 in one block": {},
}
KIND_CASES = [
    (family, kind, dtype)
    for i, family in enumerate([*HEADS, "llama-biased"])
    for kind in KINDS
    for dtype in ([torch.float64, torch.float32][i % 2],)
]


@pytest.mark.parametrize(("family", "kind", "dtype"), KIND_CASES, ids=str)
def test_adapters_of_every_kind(tmp_path: Path, family: str, kind: str, dtype: torch.dtype) -> None:
    cfg, fields = config(family), KINDS[kind]
    if kind == "ia3 in one block":
        names = decoder_of(cfg).names
        fields = {"train": "ia3", "ia3": {"targets": [f"{names.blocks}.1.{name}" for name in (*names.into, names.out)]}}
    columns = [name.rpartition(".")[2] for name in (*decoder_of(cfg).names.qkv, *decoder_of(cfg).names.into)]
    if kind == "dora" and family != "llama":  # of one device, for which it is exact everywhere
        fields = {"lora": fields["lora"] | {"targets": columns}}
    saved = train_and_save(tmp_path, cfg, 1 if kind == "dora" and family == "llama" else 3, dtype, **fields)
    before, adapted = logits(stock(saved.base)), logits(strictly_loaded(saved))
    assert abs(loss_of(adapted) - saved.loss) < (1e-9 if dtype == torch.float64 else 1e-5)
    assert abs(loss_of(before) - saved.loss) > 1e-3, "training must have changed something to compare"

    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    assert (logits(stock(tmp_path / "merged")) - adapted).abs().max() < 1e-9


@pytest.mark.parametrize(("family", "world", "tied", "dtype"), CASES, ids=str)
def test_a_plain_checkpoint_after_full_fine_tuning(
    tmp_path: Path, family: str, world: int, tied: bool, dtype: torch.dtype
) -> None:
    cfg = config(family, tie_word_embeddings=tied)
    saved = train_and_save(tmp_path, cfg, world, dtype, train="full")
    model = stock(saved.base)
    before = logits(model)
    weights = dict(model.named_parameters())
    assert set(saved.trained) == {name for name in weights if not any(table in name for table in TABLES)}
    with torch.no_grad():
        for name, tensor in saved.trained.items():
            weights[name].copy_(tensor)
    found = logits(stock(saved.result))
    assert (found - logits(model)).abs().max() < 1e-9
    assert (found - before).abs().max() > 0.05
    assert abs(loss_of(found) - saved.loss) < (1e-9 if dtype == torch.float64 else 1e-5)
    with Checkpoint.open(saved.result) as written, Checkpoint.open(saved.base) as base:
        assert written.names == base.names
        assert {written.dtype(name) for name in written.names} == {torch.float64}


TARGETS = {
    "subset": (["q_proj", "down_proj"], ["down_proj", "q_proj"]),
    "one block": (["layers.1.mlp.up_proj"], ["layers.1.mlp.up_proj"]),
    "all": (
        ["all-linear"],
        ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    ),
    "all beside a name": (
        ["q_proj", "all-linear"],
        ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"],
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_targets_are_written_as_peft_reads_them(tmp_path: Path, case: str) -> None:
    asked, written = TARGETS[case]
    saved = train_and_save(tmp_path, config("llama"), 3, torch.float64, lora={"rank": 2, "targets": asked})
    assert json.loads((saved.result / "adapter_config.json").read_text())["target_modules"] == written
    linears = {name.split(".lora_")[0] for name in saved.trained}
    assert all(any(name.endswith("." + target) for target in written) for name in linears)
    assert abs(loss_of(logits(strictly_loaded(saved))) - saved.loss) < 1e-9


@pytest.mark.parametrize("targets", [["all-linear"], ["up", "o"]], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_an_adapter_above_frozen_blocks(tmp_path: Path, family: str, targets: list[str]) -> None:
    cfg = config(family, num_hidden_layers=3)
    names = decoder_of(cfg).names
    asked = [{"up": names.into[-1], "o": names.o}.get(target, target) for target in targets]
    fields = {"lora": {"rank": 2, "targets": asked}, "frozen_blocks": 2}
    saved = train_and_save(tmp_path, cfg, 3, torch.float64, **fields)
    assert saved.trained
    assert all(name.startswith(f"{names.blocks}.2.") for name in saved.trained)
    assert json.loads((saved.result / "adapter_config.json").read_text())["layers_to_transform"] == [2]
    adapted = strictly_loaded(saved)
    there = {name.replace(".default", "") for name, _ in adapted.named_parameters() if "lora_" in name}
    assert there == {f"base_model.model.{name}" for name in saved.trained}
    assert abs(loss_of(logits(adapted)) - saved.loss) < 1e-9
    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    assert (logits(stock(tmp_path / "merged")) - logits(adapted)).abs().max() < 1e-9


def test_a_plain_checkpoint_with_frozen_blocks(tmp_path: Path) -> None:
    saved = train_and_save(tmp_path, config("llama"), 3, torch.float64, train="full", frozen_blocks=1)
    assert abs(loss_of(logits(stock(saved.result))) - saved.loss) < 1e-9
    with Checkpoint.open(saved.result) as written, Checkpoint.open(saved.base) as base:
        assert written.names == base.names
        changed = {name for name in base.names if not torch.equal(base.read(name), written.read(name))}
    assert changed == set(saved.trained)
    assert len(changed) == 10  # of the second block, and the last norm


@pytest.mark.parametrize("kind", ["ia3", "dora"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_adapters_of_other_kinds_above_frozen_blocks(tmp_path: Path, family: str, kind: str) -> None:
    cfg = config(family, num_hidden_layers=3)
    names = decoder_of(cfg).names
    of_columns = {"use_dora": True, "targets": [names.qkv[0], names.into[-1]]}
    fields = {"train": "ia3"} if kind == "ia3" else {"lora": {**of_columns, "rank": 2}}
    saved = train_and_save(tmp_path, cfg, 3, torch.float64, frozen_blocks=2, **fields)
    assert saved.trained
    assert all(name.startswith(f"{names.blocks}.2.") for name in saved.trained)
    adapted = strictly_loaded(saved)
    assert abs(loss_of(logits(adapted)) - saved.loss) < 1e-9
    merge(saved.result, saved.base, tmp_path / "merged", overwrite=False)
    assert (logits(stock(tmp_path / "merged")) - logits(adapted)).abs().max() < 1e-9
