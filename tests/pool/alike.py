"""A pool by any plan beside the plain single-process model: loss, gradients and weights, in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pool.parity_models import CLIP, LEARNING_RATE, WEIGHTS_WITHIN, Models, Steps, far, turns_of
from pool.plain import PlainRun
from pool.tiny import batch, config, three_steps
from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges, split_by
from potluck.chain.trained import Trained
from potluck.job_sections import Adapter, Lora
from potluck.models.families import decoder_of, with_frozen
from potluck.models.families.decoder import Decoder
from potluck.models.weights import Weights
from potluck.pool.gradients import unequal
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.build import part_for, strategy_for
from potluck.texts.batch import Batch
from worlds import run_world

_MANY = [(9, 7), (8, 3), (6, 6), (10, 4), (5, 2), (7, 7)]
STEPS: dict[str, Callable[[], Steps]] = {
    "three": three_steps,
    "many": lambda: [[batch(lengths, 9 * step + m) for m, lengths in enumerate(_MANY)] for step in (0, 1)],
}
"""``many``: as many micro-batches as a pipeline wants."""

Counts = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Heads, columns and vocabulary rows of each rank."""
Stages = Sequence[tuple[int, int]]
"""Of each stage in the chain's order: the rank that has it, and how many links."""


def tensor_plan(heads: Sequence[int], columns: Sequence[int], rows: Sequence[int]) -> Plan:
    ranges = zip(*(split_by(counts) for counts in (heads, columns, rows)), strict=True)
    devices = [DeviceShare(f"device-{rank}", *each) for rank, each in enumerate(ranges)]
    return Plan("tensor" if len(devices) > 1 else "single", tuple(devices))


def whole_of(decoder: Decoder) -> tuple[Ranges, Ranges, Ranges]:
    totals = (decoder.num_heads, decoder.intermediate_size, decoder.head_rows)
    heads, columns, rows = (Ranges.of(0, total) for total in totals)
    return heads, columns, rows


def data_plan(decoder: Decoder, speeds: Sequence[float], micro_batch_size: int | None = None) -> Plan:
    devices = [DeviceShare(f"device-{rank}", *whole_of(decoder), speed=speed) for rank, speed in enumerate(speeds)]
    return Plan("data", tuple(devices), micro_batch_size=micro_batch_size)


def pipeline_plan(decoder: Decoder, stages: Stages) -> Plan:
    heads, columns, rows = whole_of(decoder)
    links = split_by(count for _, count in stages)
    devices = {
        rank: DeviceShare(f"device-{rank}", heads, columns, rows if of_stage is links[-1] else Ranges(()), of_stage)
        for (rank, _), of_stage in zip(stages, links, strict=True)
    }
    return Plan("pipeline", tuple(devices[rank] for rank in range(len(stages))))


def check_alike(
    plan: Plan,
    decoder: Decoder,
    weights: Weights,
    plain: PlainRun,
    steps: Steps,
    *,
    adapter: Adapter | None,
    train_embeddings: bool = False,
    owners: Sequence[int] = (0,),
    messages: bool = True,
    **settings: Any,
) -> list[dict[str, Tensor]]:
    """Train by ``plan`` from where the plain run began, and compare; returns what each rank has in the end.

    Args:
        plan: what each rank holds.
        decoder: the model's description.
        weights: the model.
        plain: by the book, on the same steps.
        steps: what is trained on.
        adapter: what is trained beside the model; None for the model itself.
        train_embeddings: the tables too.
        owners: who has the micro-batches, in turn.
        messages: False for a device alone without a process group.
        **settings: of :class:`Settings`, where they differ.
    """
    world = len(plan.devices)
    set_up = Settings(steps=3, learning_rate=LEARNING_RATE, schedule="constant", clip=CLIP, **settings)

    def body(comm: Comm) -> tuple[list[str], dict[str, Tensor]]:
        part = part_for(
            plan,
            comm.rank,
            weights,
            decoder,
            compute=torch.float64,
            adapter=adapter,
            seed=0,
            train_embeddings=train_embeddings,
        )
        trained = {t.name: t for t in part.chain.trained}
        for name, t in trained.items():
            assert t.shape == plain.initial[name].shape
            t.local.detach().copy_(_local(t, plain.initial[name], comm.rank))
        strategy = strategy_for(plan, part, comm, set_up)
        stepper = Stepper(part, comm, set_up, strategy)
        for step, batches in enumerate(steps):
            found = stepper.accumulate(turns_of(batches, owners, comm.rank))
            assert found.owned_targets == tuple(_owned(batches, owners, rank) for rank in range(world))
            assert abs(found.loss - plain.losses[step]) < 1e-9
            for h in strategy.held if step == 0 else ():
                name, local = h.trained.name, h.trained.local
                if local.numel() and (h.home in (None, comm.rank) or plan.strategy in ("tensor", "single")):
                    assert local.grad is not None, name
                    assert far(local.grad, _local(trained[name], plain.gradients[name], comm.rank)) < 1e-9, name
            stepper.update(found.norm, LEARNING_RATE)
        for name, t in trained.items():
            assert far(t.local.detach(), _local(t, plain.weights[name], comm.rank)) < WEIGHTS_WITHIN, name
        if plan.strategy != "pipeline":
            assert list(unequal(strategy.held, comm)) == []
        gathered = list(strategy.whole())
        assert all(far(tensor, plain.weights[name]) < WEIGHTS_WITHIN for name, tensor in gathered)
        return sorted(name for name, _ in gathered), {name: t.local.detach().clone() for name, t in trained.items()}

    ends = run_world(world, body) if messages else [body(Comm())]
    assert [names for names, _ in ends] == [sorted(plain.initial), *[[]] * (world - 1)], "each once, on rank 0"
    return [had for _, had in ends]


def check_family(
    models: Models,
    family: str,
    plan: Plan,
    *,
    targets: Sequence[str] | None = ("all-linear",),
    tied: bool = True,
    frozen_blocks: int = 0,
    steps: str = "three",
    optimizer: str = "adamw",
    weight_decay: float = 0.0,
    **how: Any,
) -> None:
    """:func:`check_alike` of a tiny decoder with LoRA on ``targets``, or (None) trained in full."""
    decoder = with_frozen(decoder_of(config(family, tie_word_embeddings=tied)), frozen_blocks)
    names = None if targets is None else tuple(targets)
    adapter = None if targets is None else Lora(rank=4, alpha=8, targets=list(targets))
    stepped = {"optimizer": optimizer, "weight_decay": weight_decay}
    plain = models.plain(family, tied, names, steps, frozen=decoder.frozen, **stepped)
    check_alike(
        plan, decoder, models.checkpoint(family, tied), plain, STEPS[steps](), adapter=adapter, **stepped, **how
    )


def _local(trained: Trained, whole: Tensor, rank: int) -> Tensor:
    """What ``rank`` has of a whole tensor; of a part that was built as the only one, all."""
    if trained.dim is None or len(trained.held) <= 1:
        return whole
    return whole.index_select(trained.dim, torch.tensor(list(trained.held[rank]), dtype=torch.long))


def _owned(batches: Sequence[Batch], owners: Sequence[int], rank: int) -> int:
    """Targets of the micro-batches that ``rank`` has."""
    return sum(each.targets_N.numel() for turn in turns_of(batches, owners, rank) for each in turn.batches or ())
