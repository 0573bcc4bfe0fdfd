"""A pool by any plan beside the plain single-process model: loss, gradients and weights, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pool.parity_models import CLIP, LEARNING_RATE, Models, Steps, far, turns_of
from pool.tiny import batch, config, three_steps
from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges, split_by
from potluck.chain.trained import Trained
from potluck.job_sections import Lora
from potluck.models.families import decoder_of, with_frozen
from potluck.pool.gradients import unequal
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.build import part_for, strategy_for
from worlds import run_world

_MANY = [(9, 7), (8, 3), (6, 6), (10, 4), (5, 2), (7, 7)]
STEPS: dict[str, Callable[[], Steps]] = {
    "three": three_steps,
    "many": lambda: [[batch(lengths, 9 * step + m) for m, lengths in enumerate(_MANY)] for step in (0, 1)],
}
"""``many``: as many micro-batches as a pipeline wants."""

Stages = Sequence[tuple[int, int]]
"""Of each stage in the chain's order: the rank that has it, and how many links."""


def tensor_plan(heads: Sequence[int], columns: Sequence[int], rows: Sequence[int]) -> Plan:
    ranges = zip(*(split_by(counts) for counts in (heads, columns, rows)), strict=True)
    devices = [DeviceShare(f"device-{rank}", *each) for rank, each in enumerate(ranges)]
    return Plan("tensor" if len(devices) > 1 else "single", tuple(devices))


def whole(family: str) -> tuple[Ranges, Ranges, Ranges]:
    d = decoder_of(config(family))
    return Ranges.of(0, d.num_heads), Ranges.of(0, d.intermediate_size), Ranges.of(0, d.vocab_size)


def data_plan(family: str, speeds: Sequence[float]) -> Plan:
    devices = [DeviceShare(f"device-{rank}", *whole(family), speed=speed) for rank, speed in enumerate(speeds)]
    return Plan("data", tuple(devices))


def pipeline_plan(family: str, stages: Stages) -> Plan:
    heads, columns, rows = whole(family)
    links = split_by(count for _, count in stages)
    devices = {
        rank: DeviceShare(f"device-{rank}", heads, columns, rows if links_of is links[-1] else Ranges(()), links_of)
        for (rank, _), links_of in zip(stages, links, strict=True)
    }
    return Plan("pipeline", tuple(devices[rank] for rank in range(len(stages))))


def local_part(trained: Trained, of_whole: Tensor, rank: int) -> Tensor:
    if trained.dim is None or not trained.held:
        return of_whole
    held = trained.held[rank] if len(trained.held) > 1 else trained.held[0]
    return of_whole.index_select(trained.dim, torch.tensor(list(held), dtype=torch.long))


def check_alike(
    models: Models,
    family: str,
    plan: Plan,
    *,
    targets: Sequence[str] | None = ("all-linear",),
    frozen_blocks: int = 0,
    half_batches: int = 2,
    checkpointing: bool = False,
    steps: str = "three",
    messages: bool = True,
    **optimizer: Any,
) -> None:
    """Train three steps by ``plan`` and by the book; ``optimizer``: its name and weight decay, where they differ."""
    cfg = config(family, tie_word_embeddings=True)
    checkpoint, decoder = models.checkpoint(family), with_frozen(decoder_of(cfg), frozen_blocks)
    names = None if targets is None else tuple(targets)
    plain = models.plain(family, True, names, steps, frozen=decoder.frozen, **optimizer)
    lora = None if targets is None else Lora(rank=4, alpha=8, targets=list(targets))
    settings = Settings(
        steps=3,
        learning_rate=LEARNING_RATE,
        schedule="constant",
        clip=CLIP,
        half_batches=half_batches,
        checkpointing=checkpointing,
        **optimizer,
    )
    batches_of = STEPS[steps]()

    def body(comm: Comm) -> list[str]:
        part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float64, adapter=lora, seed=0)
        trained = part.chain.trained
        for t in trained:
            t.local.detach().copy_(local_part(t, plain.initial[t.name], comm.rank))
        strategy = strategy_for(plan, part, comm, settings)
        stepper = Stepper(part, comm, settings, strategy)
        for step, batches in enumerate(batches_of):
            found = stepper.accumulate(turns_of(batches, [0], comm.rank))
            assert abs(found.loss - plain.losses[step]) < 1e-9
            for t in trained if step == 0 else ():
                if plan.strategy != "data" or t.local.grad is not None:
                    assert t.local.grad is not None, t.name
                    assert far(t.local.grad, local_part(t, plain.gradients[t.name], comm.rank)) < 1e-9, t.name
            stepper.update(found.norm, LEARNING_RATE)
        for t in trained:
            assert far(t.local.detach(), local_part(t, plain.weights[t.name], comm.rank)) < 1e-9, t.name
        if plan.strategy != "pipeline":
            assert list(unequal(strategy.held, comm)) == []
        gathered = dict(strategy.whole())
        assert all(far(tensor, plain.weights[name]) < 1e-9 for name, tensor in gathered.items())
        return sorted(gathered)

    found = run_world(len(plan.devices), body) if messages else [body(Comm())]
    assert found[0] == sorted(plain.initial)
