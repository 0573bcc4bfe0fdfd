"""The formula of what passes agrees with what did pass, in every scheme."""

from pathlib import Path
from typing import Any

import pytest
import torch
from step_worlds import VOCAB, run, save_model, some_texts, step_job

from potluck.job_sections import Split
from potluck.models.checkpoint import Checkpoint
from potluck.split import client as client_module
from potluck.split.client_data import ClientData, client_data
from potluck.split.listener import SplitListener
from potluck.split.parts import client_part
from potluck.split.settings import settle
from potluck.split.volumes import Load, Volume, scheme_bytes, step_bytes
from potluck.texts.batch import Example

HIDDEN = 192
STEPS = 3
CLIENTS = 2
SIDE = ("control", "other", "manifest", "model", "steps")
VARIANTS: list[Any] = [
    {"scheme": "one-shot", "encoding": "int8"},
    {"scheme": "l-shaped", "encoding": "bf16", "client": "trainable"},
    {"scheme": "u-shaped", "encoding": "bf16", "client": "trainable", "average_every": 2},
    *(
        pytest.param(split, marks=pytest.mark.slow)
        for split in (
            {"scheme": "one-shot", "encoding": "fp32"},
            {"scheme": "one-shot", "encoding": "int4"},
            {"scheme": "one-shot", "encoding": "int8", "targets": "ids"},
            {"scheme": "l-shaped", "encoding": "int8"},
            {"scheme": "l-shaped", "encoding": "bf16", "client": "trainable", "targets": "ids"},
            {"scheme": "u-shaped", "encoding": "fp32"},
        )
    ),
]


def load_of(examples: tuple[Example, ...], *, share: bool) -> Load:
    prefixes = {example.ids[: i + 1] for example in examples for i in range(len(example.ids) - 1)}
    return Load(
        examples=len(examples),
        tokens=sum(len(example.ids) - 1 for example in examples),
        targets=sum(sum(example.supervised) for example in examples),
        rows=len(prefixes) if share else None,
    )


@pytest.mark.parametrize("split", VARIANTS, ids=lambda split: " ".join(map(str, split.values())))
def test_the_formula_agrees_with_the_counters_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: dict[str, Any]
) -> None:
    data: dict[int, ClientData] = {}
    real = client_data

    def keep(*args: Any, **kwargs: Any) -> ClientData:
        found = real(*args, **kwargs)
        return data.setdefault(len(found.train), found)

    monkeypatch.setattr(client_module, "client_data", keep)
    save_model(tmp_path / "model", hidden_size=HIDDEN, intermediate_size=256)
    job = step_job(tmp_path, split, steps=STEPS, batch_size=64, lora={"rank": 16})
    # a few begin alike, so that prefixes are shared
    texts = {f"client-{n}": some_texts(34 + n, n, words=(30, 45), used=200) for n in range(CLIENTS)}
    ran = run(job, tmp_path, texts, holdout="14")
    assert (ran.error, ran.errors) == (None, {})
    assert job.split is not None
    for contributed in ran.clients.values():
        own = data[contributed.examples]
        assert contributed.held_out == len(own.held_out) == 14
        one_shot = job.split.scheme == "one-shot"
        loads = [load_of(own.train, share=one_shot)] * (1 if one_shot else STEPS)
        targets = {
            t for e in (*own.train, *own.held_out) for t, wanted in zip(e.ids, e.supervised, strict=True) if wanted
        }
        expected = scheme_bytes(
            job.split,
            HIDDEN,
            loads,
            load_of(own.held_out, share=one_shot),
            table_rows=len(targets),
            negatives=-(-VOCAB // CLIENTS),
            adapter_parameters=0 if job.split.client == "frozen" else _adapter_parameters(tmp_path, job.lora.rank),
        )
        assert_agrees(contributed.bytes, expected)


def _adapter_parameters(tmp_path: Path, rank: int) -> int:
    job = step_job(tmp_path, {}, lora={"rank": rank})
    settled = settle(job, SplitListener())
    with Checkpoint.open(settled.model_dir) as checkpoint:
        part = client_part(checkpoint, settled.decoder, 1, compute=torch.float32, adapter=job.lora, seed=0)
    return sum(t.local.numel() for t in part.part.trained)


def assert_agrees(counted: dict[str, dict[str, int]], expected: Volume) -> None:
    for way, formula in (("sent", expected.up), ("received", expected.down)):
        found = {kind: size for kind, size in counted[way].items() if kind not in SIDE}
        formula = {kind: size for kind, size in formula.items() if size}
        # an answer that brings nothing has a few bytes of header
        found = {kind: size for kind, size in found.items() if kind in formula or size > 1000}
        assert found.keys() == formula.keys()
        for kind, size in formula.items():
            assert found[kind] == pytest.approx(size, rel=0.01), (way, kind)


def test_l_shaped_against_u_shaped_with_every_token_a_target() -> None:
    """As DESIGN has it: 4A, 3A with raw target rows, and about 2A with a table and an index a token."""
    load = Load(examples=32, tokens=32 * 127, targets=32 * 127)
    steps = [load] * 300
    fields: dict[str, Any] = {"client": "trainable", "encoding": "bf16", "average_every": 10}
    u_shaped, l_shaped = (Split(scheme=scheme, **fields) for scheme in ("u-shaped", "l-shaped"))
    activations = load.tokens * 576 * 2
    u_step, l_step = (step_bytes(split, 576, load).total for split in (u_shaped, l_shaped))
    assert u_step == pytest.approx(4 * activations, rel=0.001)
    assert l_step == pytest.approx(2 * activations, rel=0.004)
    assert (l_step + activations) / u_step == pytest.approx(0.75, abs=0.002)
    whole_l = scheme_bytes(l_shaped, 576, steps, table_rows=8000, negatives=4096 // 3).total
    whole_u = scheme_bytes(u_shaped, 576, steps).total
    assert 0.5 < whole_l / whole_u < 0.53


def test_a_step_without_examples_costs_nothing_and_averaging_is_counted_at_the_end_too() -> None:
    split = Split(scheme="l-shaped", client="trainable", targets="ids", average_every=10)
    for steps, times in ((1, 1), (10, 1), (11, 2), (20, 2)):
        volume = scheme_bytes(split, 64, [Load()] * steps, adapter_parameters=100)
        assert volume == Volume({"adapter": times * 400}, {"adapter": times * 400})
