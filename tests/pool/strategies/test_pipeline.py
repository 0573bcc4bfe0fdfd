"""Stages of any cut train exactly as the plain single-process model, in float64, and ids go where they are needed."""

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pool.leaks import leaks, secrets
from pool.parity_models import CLIP, LEARNING_RATE, WEIGHTS_WITHIN, Models, far, turns_of
from pool.tiny import FAMILIES, VOCAB, batch, config
from potluck.chain.comm import Comm
from potluck.chain.embedding import Embedding
from potluck.chain.ranges import Ranges, split_by
from potluck.job import Job
from potluck.job_sections import Lora
from potluck.models.adapter import read_tensors
from potluck.models.families import decoder_of
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.step import Settings, Stepper, StepReport
from potluck.pool.strategies.build import part_for, strategy_for
from potluck.pool.trainer import save
from potluck.texts.batch import Batch, Layout
from worlds import run_world

SETTINGS = Settings(steps=3, learning_rate=LEARNING_RATE, schedule="constant", clip=CLIP)

Stages = list[tuple[int, int]]
"""Of each stage in the chain's order: the rank that has it, and its links."""

STAGES: dict[str, Stages] = {
    "1": [(0, 4)],
    "2: 1/3": [(0, 1), (1, 3)],
    "2: 2/2, the coordinator last": [(1, 2), (0, 2)],
    "2: a block each": [(0, 2), (1, 2)],
    "3: 1/1/2, the coordinator in the middle": [(2, 1), (0, 1), (1, 2)],
    "3: 2/1/1, the coordinator last": [(1, 2), (2, 1), (0, 1)],
    "4: a link each": [(3, 1), (1, 1), (0, 1), (2, 1)],
}


THOROUGH = ["llama", "gemma3"]
DIVIDED = [family for family in FAMILIES if decoder_of(config(family)).links_together == 1]
"""Families whose blocks may be divided."""


def silent(whole: Batch) -> Batch:
    """The batch without any target."""
    return Batch(
        whole.ids_BS, torch.zeros(0, dtype=torch.long), Layout(whole.layout.lengths, ((),) * len(whole.ids_BS))
    )


def three_uneven_steps() -> list[list[Batch]]:
    """More micro-batches than any of the pipelines has stages, then a single one, then some that end incomplete."""
    many = [batch(lengths, i) for i, lengths in enumerate([(9, 7), (8, 3), (6, 6), (10, 4), (5, 2), (7, 7)])]
    return [[*many[:3], silent(many[4]), *many[3:]], [batch((9, 5, 4), 11)], [batch((7, 7, 5), 21), batch((6,), 23)]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), {"uneven": three_uneven_steps})


def plan_of(family: str, stages: Stages) -> Plan:
    cfg = config(family)
    heads, columns = Ranges.of(0, cfg.num_attention_heads), Ranges.of(0, cfg.intermediate_size)
    links = split_by(count for _, count in stages)
    devices = {
        rank: DeviceShare(
            f"device-{rank}",
            heads,
            columns,
            Ranges.of(0, VOCAB) if of_stage is links[-1] else Ranges(()),
            of_stage,
        )
        for (rank, _), of_stage in zip(stages, links, strict=True)
    }
    return Plan("pipeline", tuple(devices[rank] for rank in range(len(stages))))


def check_parity(
    models: Models,
    family: str,
    stages: Stages,
    *,
    targets: Sequence[str] | None = ("all-linear",),
    tied: bool = True,
    checkpointing: bool = False,
    owners: Sequence[int] = (0,),
) -> None:
    plain = models.plain(family, tied, None if targets is None else tuple(targets), "uneven")
    checkpoint, plan = models.checkpoint(family, tied), plan_of(family, stages)
    decoder = decoder_of(config(family, tie_word_embeddings=tied))
    lora = None if targets is None else Lora(rank=4, alpha=8, targets=list(targets))
    settings = replace(SETTINGS, checkpointing=checkpointing)

    def body(comm: Comm) -> list[str]:
        part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float64, adapter=lora, seed=0)
        trained = part.chain.trained
        for t in trained:
            t.local.detach().copy_(plain.initial[t.name])
        stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
        for step, batches in enumerate(three_uneven_steps()):
            found = stepper.accumulate(turns_of(batches, owners, comm.rank))
            assert abs(found.loss - plain.losses[step]) < 1e-9
            for t in trained if step == 0 else ():
                assert t.local.grad is not None
                assert far(t.local.grad, plain.gradients[t.name]) < 1e-9, t.name
            stepper.update(found.norm, LEARNING_RATE)
        for t in trained:
            assert far(t.local.detach(), plain.weights[t.name]) < WEIGHTS_WITHIN, t.name
        gathered = dict(stepper.strategy.whole())
        assert set(gathered) == (set(plain.weights) if comm.rank == 0 else set())
        assert all(far(tensor, plain.weights[name]) < WEIGHTS_WITHIN for name, tensor in gathered.items())
        return [t.name for t in trained]

    names = [name for of_rank in run_world(len(stages), body) for name in of_rank]
    assert sorted(names) == sorted(plain.initial)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["keep", "recompute"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=["full", "lora"])
@pytest.mark.parametrize("world", STAGES)
@pytest.mark.parametrize("family", THOROUGH)
def test_stages_are_the_plain_model(
    models: Models, family: str, world: str, targets: list[str] | None, tied: bool, checkpointing: bool
) -> None:
    check_parity(models, family, STAGES[world], targets=targets, tied=tied, checkpointing=checkpointing)


@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=["full", "lora"])
@pytest.mark.parametrize("family", [family for family in DIVIDED if family not in THOROUGH])
def test_families(models: Models, family: str, targets: list[str] | None) -> None:
    check_parity(models, family, STAGES["3: 1/1/2, the coordinator in the middle"], targets=targets, tied=False)


@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=["full", "lora"])
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {*DIVIDED}))
def test_blocks_that_are_not_divided(models: Models, family: str, targets: list[str] | None) -> None:
    check_parity(models, family, STAGES["2: a block each"], targets=targets)


@pytest.mark.parametrize("world", STAGES)
@pytest.mark.parametrize("target", ["layers.0.self_attn.v_proj", "layers.1.mlp.up_proj", "layers.1.self_attn.o_proj"])
def test_stages_without_anything_trained(models: Models, world: str, target: str) -> None:
    check_parity(models, "llama", STAGES[world], targets=[target])


@pytest.mark.parametrize("owners", [(1,), (2,), (2, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("world", ["3: 1/1/2, the coordinator in the middle", "3: 2/1/1, the coordinator last"])
def test_owners_anywhere_along_the_chain(models: Models, world: str, owners: tuple[int, ...]) -> None:
    check_parity(models, "llama", STAGES[world], owners=owners)


def test_dropout_is_that_of_a_device_alone(models: Models) -> None:
    decoder, checkpoint = decoder_of(config("llama", tie_word_embeddings=True)), models.checkpoint("llama")
    lora = Lora(rank=4, dropout=0.3)
    steps = three_uneven_steps()

    def gradients(stages: Stages) -> dict[str, Tensor]:
        plan = plan_of("llama", stages)

        def body(comm: Comm) -> dict[str, Tensor]:
            part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float64, adapter=lora, seed=5)
            settings = replace(SETTINGS, half_batches=1, seed=9)
            strategy = None if len(stages) == 1 else strategy_for(plan, part, comm, settings)
            Stepper(part, comm, settings, strategy).accumulate(turns_of(steps[0], [0], comm.rank))
            return {t.name: t.local.grad for t in part.chain.trained if t.local.grad is not None}

        return {name: each for of_rank in run_world(len(stages), body) for name, each in of_rank.items()}

    alone, together = gradients([(0, 4)]), gradients(STAGES["3: 1/1/2, the coordinator in the middle"])
    assert set(alone) == set(together)
    assert all(far(together[name], alone[name]) < 1e-9 for name in alone)


@pytest.mark.parametrize("owner", [0, 1, 2])
def test_ids_go_to_the_first_stage_and_labels_to_the_last(models: Models, owner: int) -> None:
    stages = STAGES["3: 1/1/2, the coordinator in the middle"]
    plan, decoder = plan_of("llama", stages), decoder_of(config("llama", tie_word_embeddings=True))
    first, last = stages[0][0], stages[-1][0]
    batches = [batch((14, 11, 10), 1), batch((12, 9), 2), batch((13, 8), 3), batch((11,), 4)]
    sent: list[list[tuple[int, Tensor]]] = [[] for _ in stages]
    heard: list[list[Tensor]] = [[] for _ in stages]

    def body(comm: Comm) -> None:
        start_send = comm.start_send

        def recorded(x: Tensor, to: int, tag: int, *, exact: bool = False) -> object:
            sent[comm.rank].append((to, x.detach().clone()))
            return start_send(x, to, tag, exact=exact)

        part = part_for(
            plan, comm.rank, models.checkpoint("llama"), decoder, compute=torch.float32, adapter=Lora(), seed=0
        )
        if comm.rank != first:
            part = replace(part, embedding=Embedding(lambda ids: pytest.fail(f"looked up {ids}"), 1.0))
        stepper = Stepper(part, comm, SETTINGS, strategy_for(plan, part, comm, SETTINGS))
        comm.start_send = recorded  # type: ignore[method-assign]
        stepper.step(turns_of(batches, [owner], comm.rank))

    run_world(
        3, body, wire=torch.bfloat16, listener=lambda rank: lambda _, content: heard[rank].append(content.clone())
    )
    whole = {(to, content) for rank in range(3) for to, content in sent[rank] if not content.is_floating_point()}
    expected = [(first, each.ids_BS) for each in batches if owner != first]
    expected += [(last, each.targets_N) for each in batches if owner != last]
    assert len(whole) == len(expected)
    for to, content in expected:
        assert any(to == other and torch.equal(content, x) for other, x in whole)
    assert all(x.is_floating_point() for rank in range(3) if rank != owner for _, x in sent[rank])
    known = secrets(batches)
    streams = [x for of_rank in heard for x in of_rank if x.is_floating_point()]
    assert sum(x.numel() for x in streams) > 1000
    assert not any(leaks(x, known, VOCAB) for x in streams)
    assert {x.dtype for x in streams if x.ndim == 3} == {torch.bfloat16}


def test_messages_are_the_stream_and_its_gradient_once_a_border(models: Models) -> None:
    stages, cfg = STAGES["4: a link each"], config("llama")
    plan, decoder = plan_of("llama", stages), decoder_of(config("llama", tie_word_embeddings=True))
    batches = [batch((8, 6), i) for i in range(5)]
    shapes: list[list[tuple[int, ...]]] = [[] for _ in stages]

    def body(target: str, comm: Comm) -> None:
        lora = Lora(targets=[target])
        part = part_for(
            plan, comm.rank, models.checkpoint("llama"), decoder, compute=torch.float32, adapter=lora, seed=0
        )
        strategy = strategy_for(plan, part, comm, SETTINGS)
        shapes[comm.rank].clear()
        Stepper(part, comm, SETTINGS, strategy).accumulate(turns_of(batches, [3], comm.rank))

    def streams(target: str) -> list[int]:
        listener = lambda rank: lambda _, content: shapes[rank].append(tuple(content.shape))  # noqa: E731
        run_world(4, lambda comm: body(target, comm), listener=listener)
        return [shapes[rank].count((2, 8, cfg.hidden_size)) for rank, _ in stages]

    assert streams("layers.0.self_attn.q_proj") == [5, 10, 10, 5]
    assert streams("layers.0.mlp.up_proj") == [5, 5, 10, 5]
    assert streams("layers.1.mlp.down_proj") == [5, 5, 5, 0]


def test_who_waits_for_a_slow_stage_waits(models: Models) -> None:
    stages = STAGES["3: 1/1/2, the coordinator in the middle"]
    plan, decoder = plan_of("llama", stages), decoder_of(config("llama", tie_word_embeddings=True))
    slow, slept_s = stages[0][0], 0.1
    batches = [batch((8, 6), i) for i in range(4)]

    def body(comm: Comm) -> StepReport:
        part = part_for(
            plan, comm.rank, models.checkpoint("llama"), decoder, compute=torch.float32, adapter=Lora(), seed=0
        )
        rows = part.embedding.rows

        def slowly(ids: list[int]) -> Tensor:
            time.sleep(slept_s)
            return rows(ids)

        part = replace(part, embedding=replace(part.embedding, rows=slowly))
        return Stepper(part, comm, SETTINGS, strategy_for(plan, part, comm, SETTINGS)).step(
            turns_of(batches, [0], comm.rank)
        )

    devices = run_world(3, body)[0].devices
    assert devices[slow].compute_s > 4 * slept_s
    for rank, device in enumerate(devices):
        if rank != slow:
            assert device.wait_s > devices[slow].wait_s + 2 * slept_s
            assert device.compute_s < devices[slow].compute_s


def test_an_adapter_of_stages_is_saved_whole(models: Models, tmp_path: Path) -> None:
    """Rank 0 has one MLP alone, and yet writes the names and tensors of all linears."""
    plan = plan_of("llama", STAGES["3: 2/1/1, the coordinator last"])
    base, checkpoint = models.directory("llama", True), models.checkpoint("llama")
    job = Job.model_validate(
        {"model": str(base), "data": {"train": "unused"}, "output": tmp_path / "out", "lora": {"rank": 4}}
    )

    def body(comm: Comm) -> dict[str, Tensor]:
        decoder = decoder_of(config("llama", tie_word_embeddings=True))
        part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float32, adapter=job.lora, seed=0)
        for t in part.chain.trained:
            t.local.detach().normal_(generator=torch.Generator().manual_seed(len(t.name)))
        strategy = strategy_for(plan, part, comm, SETTINGS)
        save(job, strategy.whole(), comm.rank, checkpoint, decoder, base, tmp_path if comm.rank == 0 else None)
        return {t.name: t.local.detach() for t in part.chain.trained}

    trained = {name: tensor for of_rank in run_world(3, body) for name, tensor in of_rank.items()}
    saved = read_tensors(tmp_path)
    assert set(saved) == set(trained)
    assert all(torch.equal(saved[name], trained[name]) for name in trained)
    linears = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == linears


def test_a_stage_reads_its_own_links_alone(models: Models) -> None:
    checkpoint, decoder = models.checkpoint("llama", False), decoder_of(config("llama", tie_word_embeddings=False))
    stages = STAGES["3: 2/1/1, the coordinator last"]
    plan = plan_of("llama", stages)
    parts = [part_for(plan, r, checkpoint, decoder, compute=torch.float32, adapter=None, seed=0) for r in range(3)]
    everything = sum(torch.Size(checkpoint.shape(name)).numel() for name in checkpoint.names)
    table = torch.Size(checkpoint.shape("model.embed_tokens.weight")).numel()
    assert sum(part.weight_bytes for part in parts) == 4 * (everything - table)
    assert [part.head.W_VD.shape[0] for part in parts] == [VOCAB, 0, 0]
