"""Plans for heads of whole sequences: there are no vocabulary rows to share."""

from typing import Any

import numpy as np
import pytest
from transformers import BertConfig

from pool.alike import tensor_plan
from pool.profiles import MIB, job, profile, work
from pool.sequences import CLASSES, description, save_base, tiny_config
from pool.test_candidates import QUICK, of
from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.job import Job
from potluck.job_sections import Lora
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_for
from potluck.models.random_weights import RandomWeights
from potluck.pool.candidates import best, plans
from potluck.pool.cost import OWNER_BYTES, Units, predict
from potluck.pool.plan import make_plan
from potluck.pool.predict_plan import predict_plan
from potluck.pool.profile import Line, Link, Profile, Work
from potluck.pool.search import water_level
from potluck.pool.strategies.build import part_for, tables_for
from potluck.pool.task import task_of


def classify(**fields: Any) -> Job:
    return job(task="sequence-classification", data={"train": "d", "labels": ["a", "b", "c"]}, **fields)


MINILM = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


def at_work() -> Work:
    return work(config=MINILM.to_dict(), supervised=2, sequence=True)


def device(name: str, **differs: Any) -> Profile:
    fields = {"head_s": Line(alpha=0.0004, beta=0.0), "link": QUICK, "of": at_work()}
    return profile(name, **fields | differs)


@pytest.mark.parametrize(
    "fields",
    [
        {"devices": "3"},
        {"devices": "3:2:1"},
        {"devices": "2", "strategy": "pipeline", "data_stays": False, "batch_size": 8},
        {"devices": "2", "strategy": "data", "data_stays": False},
        {"devices": "1"},
    ],
    ids=str,
)
def test_a_plan_by_hand_shares_no_vocabulary(fields: dict[str, Any]) -> None:
    plan = make_plan(classify(**fields), MINILM)
    assert all(d.vocab_rows == Ranges(()) for d in plan.devices)
    assert any(12 in (len(d.heads), sum(len(each.heads) for each in plan.devices)) for d in plan.devices)


def test_rows_by_hand_are_refused() -> None:
    with pytest.raises(BadInput, match="the model has 0 vocabulary rows"):
        make_plan(classify(devices="2", shares={"vocab_rows": [10, 20]}), MINILM)


def test_an_encoder_is_not_planned_for_tokens() -> None:
    with pytest.raises(BadInput, match="set task"):
        make_plan(job(devices="2"), MINILM)


@pytest.mark.parametrize("tight", [False, True])
def test_every_strategy_is_planned(tight: bool) -> None:
    asked = classify(batch_size=4, data_stays=False)
    decoder = decoder_for(MINILM, asked)
    available = OWNER_BYTES + (550 * MIB if tight else 4000 * MIB)
    pool = [device("a", available=available), device("b", speed=0.7, available=available), device("c", speed=0.3)]
    found = plans(asked, decoder, at_work(), pool)
    for c in found:
        assert c.plan is not None
        assert c.prediction is not None
        assert np.isfinite(c.prediction.step_s)
        assert c.prediction.missing_bytes == 0 or not c.feasible
        assert all(d.vocab_rows == Ranges(()) for d in c.plan.devices)
        again = predict_plan(asked, decoder, at_work(), [p for p in pool if p.device in names(c.plan)], c.plan)
        assert again.step_s == pytest.approx(c.prediction.step_s, rel=1e-6)
    assert of("tensor-uniform", found).feasible != tight
    assert of("tensor", found).feasible, "where even shares do not fit, uneven ones may"
    shared = of("tensor", found).plan
    assert shared is not None
    assert sum(len(d.heads) for d in shared.devices) == 12
    assert best(found).feasible


def names(plan: Any) -> set[str]:
    return {d.name for d in plan.devices}


def test_the_level_without_units_is_that_of_the_least_alpha() -> None:
    alpha, members = np.array([3.0, 1.0, 2.0]), np.array([[True, True, True], [True, False, True]])
    assert water_level(alpha, np.full(3, 1e-15), members, 0).tolist() == [1.0, 2.0]


def test_a_step_has_the_heads_gradient_and_no_pairs() -> None:
    asked = classify()
    decoder = decoder_for(MINILM, asked)
    task, other = task_of(asked, decoder, at_work()), task_of(job(), decoder_for(MINILM, asked), at_work())
    assert (task.vocab_rows, task.pair_bytes) == (0, 0.0)
    assert task.head_message_bytes == 2 * 384 * 4
    assert task == other, "what a model tells is in its description alone"
    link = Link(latency_s=1e-4, bytes_per_s=1e8)
    prediction = predict(task, [device("a", link=link), device("b", link=link)], [Units(6, 768, 0)] * 2)
    assert np.isfinite(prediction.step_s)


@pytest.mark.parametrize("train", ["lora", "full"])
@pytest.mark.parametrize("family", ["bert", "roberta", "llama"])
def test_trained_elements_are_those_of_the_built_part(family: str, train: str, tmp_path: Any) -> None:
    cfg = tiny_config(family)
    decoder = description(cfg)
    with Checkpoint.open(save_base(cfg, tmp_path / "model")) as checkpoint:
        lora = Lora() if train == "lora" else None
        plan = tensor_plan([9], [26], [0])
        part = part_for(
            plan, 0, checkpoint, decoder, compute=checkpoint.dtype(checkpoint.names[0]), adapter=lora, seed=0
        )
    at = work(config=cfg.to_dict(), rows=2, length=8, supervised=2, sequence=True, train=train)
    task = task_of(classify(train=train), decoder, at)
    trained = task.trained
    counted = 9 * trained.head + decoder.num_kv_heads * trained.kv_head + 26 * trained.column + trained.replicated
    elements = sum(t.local.numel() for t in part.chain.trained)
    assert elements <= counted <= 1.06 * elements + 400
    partial = sum(t.local.numel() for t in part.chain.trained if t.gradient == "partial" and t.dim is None)
    assert partial <= task.partial_bytes / 4 <= partial + CLASSES


def test_no_head_over_the_vocabulary_is_fetched() -> None:
    decoder = description(tiny_config("llama"))
    plan = tensor_plan([5, 4], [20, 6], [0, 0])
    assert tables_for(plan, 0, decoder, owns=True) == ("model.embed_tokens.weight",)
    assert tables_for(plan, 1, decoder, owns=False) == ()
    encoder = description(tiny_config("bert"))
    of_owner = tables_for(plan, 0, encoder, owns=True)
    assert [name.split(".")[-2] for name in of_owner] == [
        "word_embeddings",
        "position_embeddings",
        "token_type_embeddings",
    ]
    assert set(of_owner) <= set(RandomWeights(encoder).names)
