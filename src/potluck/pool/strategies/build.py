"""A plan to what a device holds, what it reads ahead for that, and how it walks."""

from collections.abc import Callable

import torch

from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.job_sections import Adapter
from potluck.models.build import Part, build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families.decoder import Decoder
from potluck.models.prefetch import prefetch
from potluck.models.tables import embedding_tables, tables
from potluck.models.weights import Weights
from potluck.pool.exact import divides_rows
from potluck.pool.plan import Plan
from potluck.pool.step import Settings, tensor_parallel
from potluck.pool.strategies.data import DataParallel
from potluck.pool.strategies.pipeline import Pipeline
from potluck.pool.strategies.strategy import Strategy


def part_for(
    plan: Plan,
    rank: int,
    weights: Weights,
    decoder: Decoder,
    *,
    compute: torch.dtype,
    adapter: Adapter | None,
    seed: int,
    train_embeddings: bool = False,
) -> Part:
    """What ``rank`` holds by a plan: its cuts of every link, whole links of its own, or the whole model.

    Args:
        plan: of all ranks.
        rank: this device.
        weights: the whole model, of which no more is read than the part holds.
        decoder: its family's description.
        compute: dtype of the linears.
        adapter: the adapters, or None for full fine-tuning.
        seed: from which adapters are drawn.
        train_embeddings: as :func:`potluck.models.build.build_part` has it.

    Raises:
        BadInput: a target matches nothing, or the adapter cannot be cut so.
    """
    device = plan.devices[rank]
    alone = plan.strategy == "data" or device.links is not None
    if not alone and len(plan.devices) > 1 and (divided := divides_rows(adapter, decoder)):
        raise BadInput(f"strategy: '{plan.strategy}' is not possible: {divided}")
    return build_part(
        weights,
        decoder,
        [device.share] if alone else plan.shares,
        0 if alone else rank,
        compute=compute,
        adapter=adapter,
        seed=seed,
        links=None if device.links is None else range(*device.links.spans[0]),
        train_embeddings=train_embeddings,
    )


def strategy_for(plan: Plan, part: Part, comm: Comm, settings: Settings) -> Strategy:
    """How this rank walks by a plan; all devices prepare it together.

    Raises:
        DeviceLost: another device ended.
    """
    if all(device.links is not None for device in plan.devices):
        links = [device.links or Ranges(()) for device in plan.devices]
        return Pipeline(part, comm, links, checkpointing=settings.checkpointing, seed=settings.seed)
    if plan.strategy == "data":
        speeds = [device.speed for device in plan.devices]
        return DataParallel(
            part,
            comm,
            speeds=speeds if any(speeds) else None,
            micro_batch_size=plan.micro_batch_size,
            checkpointing=settings.checkpointing,
            seed=settings.seed,
        )
    return tensor_parallel(part, comm, settings)


def rows_dealt_at_once(plan: Plan) -> int | None:
    """How many rows of a turn an owner gives at once; None for all: ``data`` deals them to the devices itself."""
    return None if plan.strategy == "data" else plan.micro_batch_size


def tables_for(plan: Plan, rank: int, decoder: Decoder, *, owns: bool) -> tuple[str, ...]:
    """Names of the tensors of which ``rank`` will read single rows by token ids.

    These are an owner's, but the first stage's in a pipeline, where it gets all ids (the last stage holds the head);
    in ``data`` every device's.
    """
    links = plan.devices[rank].links
    if links is not None:
        return embedding_tables(decoder) if links.spans[0][0] == 0 else ()
    return tables(decoder) if owns or plan.strategy == "data" else ()


def prefetch_for(
    plan: Plan,
    rank: int,
    checkpoint: Checkpoint,
    decoder: Decoder,
    adapter: Adapter | None,
    *,
    owns: bool,
    train_embeddings: bool = False,
    progress: Callable[[int, int], None],
) -> None:
    """Have what ``rank`` will read of a model that lies elsewhere, whole tables where it will read rows by token ids.

    Args:
        plan: of all ranks.
        rank: this device.
        checkpoint: opened with a ``need``.
        decoder: the model's description.
        adapter: the adapters, or None for full fine-tuning.
        owns: whether this device has training data.
        train_embeddings: as :func:`potluck.models.build.build_part` has it.
        progress: told bytes done and bytes in all.

    Raises:
        BadInput: a target matches nothing.
        SaveFailed: the disk is full.
    """

    def build(weights: Weights) -> None:
        part_for(
            plan,
            rank,
            weights,
            decoder,
            compute=torch.float32,
            adapter=adapter,
            seed=0,
            train_embeddings=train_embeddings,
        )

    prefetch(checkpoint, build, tables_for(plan, rank, decoder, owns=owns), progress)
