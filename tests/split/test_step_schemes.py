"""Clients that stay connected: every scheme trains what one process would, and judges as stock tools do."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from little_store import examples_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from step_worlds import Ran, run, save_model, some_texts, step_job
from torch import Tensor
from transformers import AutoModelForCausalLM

from potluck.models.checkpoint import Checkpoint
from potluck.models.optimizer import scheduled
from potluck.split import client as client_module
from potluck.split.client_data import ClientData, client_data
from potluck.split.learner import Recipe
from potluck.split.listener import SplitListener
from potluck.split.parts import client_part, server_part
from potluck.split.settings import settle
from potluck.use import score

PREFIX = "base_model.model."
EXACT: dict[str, Any] = {"batch_size": 64, "epochs": 4, "clip": 0.0}
OWN = {name: some_texts(count, seed) for seed, (name, count) in enumerate({"ann": 9, "bob": 4, "cat": 6}.items())}
Rows = Mapping[str, Sequence[Mapping[str, str]]]
Run = Callable[..., Ran]


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    """Trains in one directory, so that clients keep their keys, and with them the order of their examples."""
    save_model(tmp_path / "model")
    count = 0

    def train(split: Mapping[str, Any], own: Rows = OWN, holdout: str = "0", **fields: Any) -> Ran:
        nonlocal count
        count += 1
        ran = run(step_job(tmp_path, split, output=tmp_path / f"out-{count}", **fields), tmp_path, own, holdout)
        assert (ran.error, ran.errors) == (None, {})
        return ran

    return train


def adapter(ran: Ran) -> dict[str, Tensor]:
    assert ran.outcome is not None
    return load_file(Path(ran.outcome.adapter) / "adapter_model.safetensors")


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert any(tensor.abs().max() > 0.01 for name, tensor in expected.items() if "lora_B" in name)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=2e-5)


def whole_model(tmp_path: Path, rows: Sequence[Mapping[str, str]], client: str) -> dict[str, Tensor]:
    """The same steps of a whole model by the book; a frozen client's blocks get no adapters."""
    job = step_job(tmp_path, {}, **EXACT)
    settled = settle(job, SplitListener())
    with Checkpoint.open(settled.model_dir) as checkpoint:
        shared: dict[str, Any] = {"compute": torch.float32, "adapter": job.lora, "seed": job.seed}
        parts = [server_part(checkpoint, settled.decoder, 1, **shared)]
        if client == "trainable":
            parts.append(client_part(checkpoint, settled.decoder, 1, **shared).part)
    first = {name: tensor for part in parts for name, tensor in part.tensors().items()}
    linears = sorted({name.split(".lora_")[0] for name in first})
    lora = LoraConfig(r=job.lora.rank, lora_alpha=int(job.lora.alpha), target_modules=linears)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(job.model, attn_implementation="eager"), lora)
    trained = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
    assert trained.keys() == {f"{PREFIX}{name}" for name in first}
    optimizer = torch.optim.AdamW(trained.values(), lr=job.learning_rate, weight_decay=job.weight_decay)
    steps = Recipe(4, job.learning_rate, job.schedule, job.warmup, job.weight_decay, job.clip, job.seed)
    with torch.no_grad():
        for name, tensor in first.items():
            trained[f"{PREFIX}{name}"].copy_(tensor)
    examples = examples_of(settled, rows, tmp_path)
    for step in range(steps.steps):
        loss, targets = torch.zeros(()), 0
        for example in examples:
            logits = model(torch.tensor([example.ids])).logits[0]
            at = [i for i, wanted in enumerate(example.supervised) if wanted]
            loss = loss + F.cross_entropy(logits[[i - 1 for i in at]], torch.tensor(example.ids)[at], reduction="sum")
            targets += len(at)
        (loss / targets).backward()
        optimizer.param_groups[0]["lr"] = job.learning_rate * scheduled(steps, step)
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in trained.items()}


@pytest.mark.parametrize("client", ["frozen", "trainable"])
def test_one_client_and_a_server_train_the_whole_model(tmp_path: Path, trained: Run, client: str) -> None:
    rows = OWN["ann"] + OWN["bob"]
    u_shaped = trained({"scheme": "u-shaped", "client": client}, {"ann": rows}, **EXACT)
    l_shaped = trained({"scheme": "l-shaped", "client": client, "targets": "ids"}, {"ann": rows}, **EXACT)
    expected = whole_model(tmp_path, rows, client)
    assert_close(adapter(u_shaped), adapter(l_shaped))
    assert_close(adapter(u_shaped), expected)
    assert u_shaped.outcome is not None
    assert len(u_shaped.told.losses) == u_shaped.outcome.steps == 4
    assert u_shaped.told.losses == pytest.approx(l_shaped.told.losses, rel=1e-4)
    assert u_shaped.told.losses[-1] < u_shaped.told.losses[0]


@pytest.mark.parametrize(
    "split",
    [
        {"scheme": "u-shaped"},
        {"scheme": "l-shaped", "targets": "ids"},
        {"scheme": "l-shaped", "targets": "embeddings"},  # with the whole table among table and negatives
    ],
    ids=lambda split: " ".join(split.values()),
)
def test_three_frozen_clients_train_as_one_that_has_all(tmp_path: Path, trained: Run, split: dict[str, str]) -> None:
    """Every token is drawn as a negative, so that ``target`` is cross-entropy exactly."""
    own = dict(OWN)
    ran = trained({**split, "negatives": 3 * 512}, own, **EXACT)
    everybody = [row for rows in own.values() for row in rows]
    assert_close(adapter(ran), whole_model(tmp_path, everybody, "frozen"))
    assert ran.outcome is not None
    assert (ran.outcome.examples, ran.outcome.clients) == (19, ("ann", "bob", "cat"))


def test_clients_step_as_the_server_does(trained: Run) -> None:
    """The first step of Lion changes each element by the rate, or not at all."""
    fields = {"optimizer": "lion", "steps": 1}
    ran = trained({"scheme": "u-shaped", "client": "trainable"}, {"ann": OWN["ann"]}, **fields)
    changed = {name: tensor.abs() for name, tensor in adapter(ran).items() if "lora_B" in name}
    assert {name.split("layers.")[1][0] for name in changed} == {"0", "1", "2"}
    for tensor in changed.values():
        assert ((tensor == 0) | (tensor - 0.01).abs().lt(1e-8)).all()
        assert tensor.any()


@pytest.mark.parametrize("client", ["frozen", "trainable"])
def test_both_shapes_take_the_same_batches_of_several_clients(trained: Run, client: str) -> None:
    """Clients of different size, batches of four: some steps have no example of the smallest client."""
    shared = {"client": client, "average_every": 3}
    fields: dict[str, Any] = {"batch_size": 4, "epochs": 2, "clip": 0.5}
    own = {**OWN, "bob": OWN["bob"][:1]}
    u_shaped = trained({"scheme": "u-shaped", **shared}, own, **fields)
    l_shaped = trained({"scheme": "l-shaped", "targets": "ids", **shared}, own, **fields)
    assert_close(adapter(u_shaped), adapter(l_shaped))
    assert u_shaped.told.losses == pytest.approx(l_shaped.told.losses, rel=1e-4)
    assert len(u_shaped.told.losses) == 2 * 4


def test_a_cap_on_one_clients_weight_holds_in_both_shapes(trained: Run) -> None:
    own = {"ann": OWN["ann"], "bob": OWN["bob"][:1]}
    shared: dict[str, Any] = {"client": "frozen", "weight_cap": 0.6}
    u_shaped = trained({"scheme": "u-shaped", **shared}, own, **EXACT)
    l_shaped = trained({"scheme": "l-shaped", "targets": "ids", **shared}, own, **EXACT)
    assert_close(adapter(u_shaped), adapter(l_shaped))
    uncapped = trained({"scheme": "u-shaped"}, own, **EXACT)
    assert u_shaped.told.losses[0] != pytest.approx(uncapped.told.losses[0], rel=1e-3)


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> list[ClientData]:
    """What each client held back."""
    seen: list[ClientData] = []
    real = client_data

    def keep(*args: Any, **kwargs: Any) -> ClientData:
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(client_module, "client_data", keep)
    return seen


@pytest.mark.parametrize(
    ("scheme", "client", "targets"),
    [
        ("l-shaped", "trainable", "embeddings"),
        pytest.param("l-shaped", "frozen", "embeddings", marks=pytest.mark.slow),
        pytest.param("l-shaped", "trainable", "ids", marks=pytest.mark.slow),
        pytest.param("u-shaped", "frozen", "embeddings", marks=pytest.mark.slow),
        ("u-shaped", "trainable", "embeddings"),
    ],
)
def test_its_judgement_is_that_of_stock_tools(
    tmp_path: Path, trained: Run, held_out: list[ClientData], scheme: str, client: str, targets: str
) -> None:
    split = {"scheme": scheme, "client": client, "targets": targets}
    lora = {"rank": 4, "dropout": 0.3}
    ran = trained(split, {"ann": OWN["ann"], "cat": OWN["cat"]}, holdout="3", lora=lora, batch_size=4, epochs=8)
    assert ran.outcome is not None
    everybody = [example for data in held_out for example in data.held_out]
    for directory, quality in ((None, ran.outcome.before), (Path(ran.outcome.adapter), ran.outcome.after)):
        scores = score(tmp_path / "model", directory, everybody, torch.float32)
        assert quality["overall"].loss == pytest.approx(scores.loss, abs=1e-3)
        assert quality["overall"].examples == scores.examples == 6
        assert quality["overall"].target_tokens == scores.target_tokens
        assert {who: q.examples for who, q in quality.items()} == {"overall": 6, "ann": 3, "cat": 3}
    assert ran.outcome.after["overall"].loss != pytest.approx(ran.outcome.before["overall"].loss, abs=1e-4)
