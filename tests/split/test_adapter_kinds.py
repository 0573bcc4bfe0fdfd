"""rsLoRA, DoRA and (IA)^3 in two parts are those of the whole model in stock peft, and every scheme trains them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from cut_models import BATCH, RATE, examples_of, server_of, set_adapters, three_blocks, whole_model, whole_table
from little_store import fill, little_job
from step_worlds import run, save_model, some_texts, step_job
from torch import Tensor
from transformers import AutoModelForCausalLM

from pool.adapters import BOTH, DORA, RSLORA, as_ours, in_peft, lora
from pool.tiny import save_tiny
from potluck.chain.piece import At
from potluck.job import load_job
from potluck.job_sections import IA3, Adapter
from potluck.models.adapter import linear_of, read_tensors
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.models.inference import load_for_inference
from potluck.models.merge import merge
from potluck.split.forward import activations
from potluck.split.learner import Learner, fed_of
from potluck.split.parts import client_part
from potluck.split.trainer import train_store

EXAMPLES = examples_of(BATCH)
POSITIONS = [torch.tensor([p for p, s in enumerate(e.supervised[1:]) if s], dtype=torch.long) for e in EXAMPLES]
TARGETS = [torch.tensor([e.ids[p + 1] for p in at.tolist()]) for e, at in zip(EXAMPLES, POSITIONS, strict=True)]
KINDS: dict[str, Adapter] = {
    "rslora": lora(**RSLORA),
    "dora": lora(**DORA),
    "both": lora(**BOTH),
    "ia3": IA3(),
}
FIELDS: dict[str, dict[str, Any]] = {
    "dora": {"lora": {"rank": 4, "use_dora": True, "use_rslora": True}},
    "ia3": {"train": "ia3", "lora": {}, "learning_rate": 0.1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama-biased", "gpt2", "gpt_neox", "qwen3"])
def test_two_parts_have_the_gradients_of_the_whole(tmp_path: Path, family: str, kind: str) -> None:
    cfg, adapter = three_blocks(family, tied=True), KINDS[kind]
    oracle = whole_model(save_tiny(cfg, tmp_path / "model"), in_peft(adapter, family))
    expected, decoder = as_ours(oracle.run), decoder_of(cfg)
    with Checkpoint.open(tmp_path / "model") as checkpoint:
        client = client_part(checkpoint, decoder, 1, compute=torch.float64, adapter=adapter, seed=RATE.seed)
        server = server_of(checkpoint, decoder, 1, lora=adapter)
        learner = Learner(server, whole_table(checkpoint, decoder), RATE)
        both = [*client.part.trained, *server.trained]
        set_adapters(both, expected.initial)
        stream = activations(client, EXAMPLES, At(RATE.seed, 0, 0, 0))
    fed = fed_of([x.detach() for x in stream.split([len(e.ids) - 1 for e in EXAMPLES])], POSITIONS, TARGETS, None)
    fed.x_BSD.requires_grad_()
    assert learner.learn(fed, step_weight=fed.weight) == pytest.approx(expected.losses[0], rel=1e-9)
    assert fed.x_BSD.grad is not None
    stream.backward(torch.cat([x[: len(e.ids) - 1] for x, e in zip(fed.x_BSD.grad, EXAMPLES, strict=True)]))
    assert {t.name for t in both} == expected.gradients.keys()
    for t in both:
        assert t.local.grad is not None
        torch.testing.assert_close(t.local.grad, expected.gradients[t.name], rtol=1e-9, atol=1e-9)


def logits_of(model: Any) -> Tensor:
    found: Tensor = model(torch.tensor([[1, 7, 12, 13, 14]])).logits.detach()
    return found


@pytest.mark.parametrize("kind", FIELDS)
def test_what_a_store_trained_loads_in_stock_peft_and_is_merged_the_same(tmp_path: Path, kind: str) -> None:
    job = little_job(tmp_path, epochs=4, **FIELDS[kind])
    fill(job, tmp_path)
    outcome = train_store(job)
    assert outcome is not None
    assert outcome.after["overall"].loss < outcome.before["overall"].loss - 0.1
    adapted = logits_of(load_for_inference(Path(job.model), job.output, torch.float32))
    assert (adapted - logits_of(AutoModelForCausalLM.from_pretrained(job.model))).abs().max() > 0.1
    merge(job.output, Path(job.model), tmp_path / "merged", overwrite=False)
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    torch.testing.assert_close(merged, adapted, rtol=1e-4, atol=1e-4)
    before = read_tensors(job.output)
    train_store(job, further=True)
    assert read_tensors(job.output).keys() == before.keys()


@pytest.mark.parametrize("kind", FIELDS)
def test_clients_that_train_send_and_get_all_of_an_adapter(tmp_path: Path, kind: str) -> None:
    save_model(tmp_path / "model")
    own = {name: some_texts(count, seed) for seed, (name, count) in enumerate({"ann": 9, "bob": 6}.items())}
    job = step_job(tmp_path, {"scheme": "l-shaped", "client": "trainable", "targets": "ids"}, **FIELDS[kind])
    ran = run(job, tmp_path, own)
    assert (ran.error, ran.errors) == (None, {})
    assert ran.told.losses[-1] < ran.told.losses[0]
    tensors = read_tensors(job.output)
    blocks = {(linear_of(name) or "").split("layers.")[1][0] for name in tensors}
    assert blocks == {"0", "1", "2"}
    ones = [name for name in tensors if name.endswith("ia3_l")]
    assert all((tensors[name] - 1).abs().max() > 1e-4 for name in ones)
    assert bool(ones) == (kind == "ia3")
    assert any("magnitude" in name for name in tensors) == (kind == "dora")
    load_for_inference(Path(job.model), job.output, torch.float32)
    assert load_job(job.output / "job.yaml").train == job.train
