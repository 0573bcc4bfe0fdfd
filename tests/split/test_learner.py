"""One optimizer step of the server: micro-batches, weights, clipping, and what is refused."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cut_models import LORA, RATE, random_learner, three_blocks, whole_table
from torch import Tensor

from pool.plain import Lion
from pool.tiny import VOCAB, save_tiny
from potluck.errors import PotluckError
from potluck.job_sections import OptimizerName
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.split.learner import Fed, Learner, fed_of

LENGTHS = [7, 3, 5, 4]
Learners = Callable[..., Learner]


@pytest.fixture(scope="module")
def learners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learners]:
    cfg = three_blocks("llama", tied=True)
    decoder = decoder_of(cfg)
    with Checkpoint.open(save_tiny(cfg, tmp_path_factory.mktemp("model"))) as checkpoint:
        head = whole_table(checkpoint, decoder)
        yield lambda rate=RATE: random_learner(checkpoint, decoder, head, rate)


@pytest.fixture
def dropping(tmp_path: Path) -> Iterator[Learner]:
    cfg = three_blocks("llama", tied=True)
    with Checkpoint.open(save_tiny(cfg, tmp_path)) as checkpoint:
        yield random_learner(checkpoint, decoder_of(cfg), None, lora=LORA.model_copy(update={"dropout": 0.5}))


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


STREAMS = [drawn(T, 45, seed=T) for T in LENGTHS]
POSITIONS = [torch.arange(seed % 2, T, 1 + seed % 2) for seed, T in enumerate(LENGTHS)]
TARGETS = [torch.randint(VOCAB, (len(at),), generator=torch.Generator().manual_seed(len(at))) for at in POSITIONS]
COUNTED = [1.0, 0.25, 0.5, 1.0]


def fed(*examples: int, weights: list[float] | None = None) -> Fed:
    own = None if weights is None else [weights[i] for i in examples]
    return fed_of([STREAMS[i] for i in examples], [POSITIONS[i] for i in examples], [TARGETS[i] for i in examples], own)


def gradients(learner: Learner) -> dict[str, Tensor]:
    found = {}
    for t in learner.part.trained:
        assert t.local.grad is not None
        found[t.name] = t.local.grad.clone()
    return found


def values(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in learner.part.tensors().items()}


def assert_all_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-12)


def test_examples_are_padded_on_the_right() -> None:
    batch = fed(0, 1, 2, weights=COUNTED)
    assert batch.x_BSD.shape == (3, 7, 45)
    assert torch.equal(batch.x_BSD[1, :3], STREAMS[1])
    assert not batch.x_BSD[1, 3:].any()
    flat_TD = batch.x_BSD.flatten(0, 1)[batch.kept_N]
    assert torch.equal(flat_TD, torch.cat([STREAMS[i][POSITIONS[i]] for i in range(3)]))
    assert torch.equal(batch.targets_N, torch.cat(TARGETS[:3]))
    assert batch.weights_N is not None
    assert batch.weights_N.tolist() == [w for w, at in zip(COUNTED, POSITIONS[:3], strict=False) for _ in at]
    assert batch.weight == sum(batch.weights_N.tolist())
    assert fed(0, 1).weight == len(POSITIONS[0]) + len(POSITIONS[1])


@pytest.mark.parametrize("weights", [None, COUNTED], ids=["alike", "weighted"])
@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 0, 2], [1]]], ids=str)
def test_micro_batches_sum_to_the_batch(
    learners: Learners, weights: list[float] | None, parts: list[list[int]]
) -> None:
    whole, apart = learners(), learners()
    everything = fed(0, 1, 2, 3, weights=weights)
    loss = whole.learn(everything, everything.weight)
    found = [apart.learn(fed(*part, weights=weights), everything.weight, m) for m, part in enumerate(parts)]
    assert sum(found) == pytest.approx(loss, rel=1e-12)
    assert_all_close(gradients(apart), gradients(whole))


def test_weighted_loss_and_gradient_are_those_of_the_weighted_mean(learners: Learners) -> None:
    learner, other = learners(), learners()
    assert other.head is not None
    batch = fed(0, 1, 2, 3, weights=COUNTED)
    assert batch.weights_N is not None
    loss = learner.learn(batch, batch.weight)
    logits_NV = other.hidden(batch) @ other.head.W_VD.T
    loss_N = F.cross_entropy(logits_NV, batch.targets_N, reduction="none")
    expected = (loss_N * batch.weights_N).sum() / batch.weights_N.sum()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), rel=1e-12)
    assert_all_close(gradients(learner), gradients(other))


def test_all_weights_of_one_are_no_weights(learners: Learners) -> None:
    plain, weighted = learners(), learners()
    assert plain.learn(fed(0, 1), 5.0) == weighted.learn(fed(0, 1, weights=[1.0] * 4), 5.0)
    assert all(torch.equal(a, b) for a, b in zip(gradients(plain).values(), gradients(weighted).values(), strict=True))


def test_a_micro_batch_without_a_target_adds_nothing(learners: Learners) -> None:
    learner, other = learners(), learners()
    for each in (learner, other):
        each.learn(fed(0, 1), 9.0)
    empty = fed(2)
    assert learner.learn(Fed(empty.x_BSD, empty.kept_N[:0], empty.targets_N[:0]), 9.0, 1) == 0.0
    assert_all_close(gradients(learner), gradients(other))


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_an_update_is_clipped_and_at_the_scheduled_rate(learners: Learners, kind: OptimizerName) -> None:
    rate = replace(RATE, schedule="linear", warmup=0.5, steps=4, weight_decay=0.1, clip=0.01, optimizer=kind)
    learner, plain = learners(rate), learners(rate)
    parameters = [t.local for t in plain.part.trained]
    decayed = [{"params": parameters, "weight_decay": 0.1}]
    optimizer = Lion(decayed, 1.0) if kind == "lion" else torch.optim.AdamW(decayed, lr=1.0)
    for factor in (0.5, 1.0, 1.0, 0.5):
        batch = fed(0, 1, 2)
        learner.learn(batch, batch.weight)
        plain.learn(batch, batch.weight)
        expected_norm = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.step()
        optimizer.zero_grad()
        assert learner.update() == pytest.approx(float(expected_norm), rel=1e-12)
        assert_all_close(values(learner), values(plain))
    assert learner.done == 4


def test_clip_zero_turns_clipping_off(learners: Learners) -> None:
    learner = learners(replace(RATE, clip=0.0))
    learner.learn(fed(0), 0.001)
    before = gradients(learner)
    norm = math.sqrt(sum(float(g.pow(2).sum()) for g in before.values()))
    assert norm > 10
    optimizer = learner.optimizer
    assert optimizer is not None
    assert learner.update() == pytest.approx(norm)
    for t in learner.part.trained:
        torch.testing.assert_close(optimizer.state[t.local]["exp_avg"], 0.1 * before[t.name])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_no_number_changes_nothing(learners: Learners, value: float) -> None:
    learner = learners()
    batch = fed(0, 1)
    learner.learn(batch, batch.weight)
    learner.update()
    before = values(learner)
    bad_BSD = batch.x_BSD.clone()
    bad_BSD[0, 2, 3] = value
    learner.learn(Fed(bad_BSD, batch.kept_N, batch.targets_N), batch.weight)
    with pytest.raises(PotluckError, match=r"gradient of step 2 is not a finite number.*lower learning_rate"):
        learner.update()
    assert learner.done == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in values(learner).items())


def test_dropout_is_drawn_anew_in_each_step_and_micro_batch(dropping: Learner) -> None:
    drops = {}
    for dropping.done in (0, 1):
        for micro_batch in (0, 1):
            drops[dropping.done, micro_batch] = dropping.hidden(fed(0), micro_batch)
            assert torch.equal(dropping.hidden(fed(0), micro_batch), drops[dropping.done, micro_batch])
    found = list(drops.values())
    assert not any(torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
