"""Devices' profiles, arranged by links of the chain for micro-batches of some size, as stages are found from them.

Handling a message costs the compute that goes on meanwhile half of what it costs in an all-reduce of as many bytes
sent: there each device sends and receives, here it does one of them (``Link.covered_s``).
"""

import math
from collections.abc import Collection, Sequence

import numpy as np

from potluck.job import Job
from potluck.models.families.decoder import Decoder
from potluck.pool.cost import OWNER_BYTES, Floats, costs_of, head_s
from potluck.pool.elements import PerUnit, without
from potluck.pool.profile import Link, Profile, Work
from potluck.pool.reduce import CHUNK_BYTES
from potluck.pool.stage_costs import StageCosts
from potluck.pool.task import Task, task_of

_COMING = 4
"""Messages that a stage has asked for: either way one that is taken and the one after it."""


def stage_costs(
    job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], owners: Collection[str], rows: int
) -> StageCosts:
    """Arrange profiles for micro-batches of ``rows`` rows; the first device is the coordinator, always an owner.

    Raises:
        BadInput: several devices, and one of them has no link; or an adapter's target matches nothing.
    """
    owners = frozenset({profiles[0].device, *owners})
    a_turn = rows_a_turn(job, work, len(owners))
    size = min(rows, a_turn)
    scale = size / work.rows
    measured = work.model_copy(update={"rows": size, "supervised": max(1, round(work.supervised * scale))})
    alone = job.model_copy(update={"half_batches": 1, "micro_batch_size": size, "batch_size": size})
    task = task_of(alone, decoder, measured)
    costs = costs_of(task, profiles, owners)
    L, last_mlp = task.layers, task.mlp_layers - (task.layers - 1)
    mlp_L = np.append(np.ones(L - 1), last_mlp)
    several = len(profiles) > 1

    def by_link(attention_L: Floats, mlp_L: Floats) -> Floats:
        return np.concatenate(([0.0], np.cumsum(np.stack((attention_L, mlp_L), 1))))

    def amounts(per: PerUnit, among_L: Floats) -> Floats:
        attention = per.head * task.heads + per.kv_head * task.kv_heads + per.replicated / 2
        return by_link(attention * among_L, (per.column * task.columns + per.replicated / 2) * among_L)

    table_bytes = task.tables.at_both_ends_bytes
    shared_elements = task.trained.vocab_row * task.vocab_rows
    passing_bytes = 2 * min(CHUNK_BYTES, table_bytes)
    in_first = (np.arange(2 * L + 1) > 0).astype(np.float64)  # what comes with the first link
    frozen = decoder.frozen_blocks
    # where a head alone is trained, the last stage has it
    trained_L = _evenly(L, range(min(frozen, L - 1), L))
    frozen_L = _evenly(L, range(frozen if job.train == "full" and frozen else L))
    frozen_bytes = without(task.weights, task.trained, task.stepped_bytes)

    forward_part_D = np.array([p.forward_part for p in profiles])
    seconds_DN1 = np.stack(
        [
            by_link(np.full(L, p.attention_s(task.heads)), p.mlp_s(task.columns) * mlp_L) * p.part_of(size)
            for p in profiles
        ]
    )
    return StageCosts(
        task=task,
        work=measured,
        names=costs.names,
        owners=owners,
        rows=(*[size] * (a_turn // size), *([a_turn % size] if a_turn % size else [])) * len(owners),
        forward_DN1=seconds_DN1 * forward_part_D[:, None],
        backward_DN1=np.maximum(0.0, seconds_DN1 - seconds_DN1[:, [task.lowest]]) * (1 - forward_part_D[:, None]),
        head_s_D=np.array([head_s(task, p)(task.vocab_rows) * p.part_of(size) for p in profiles]),
        forward_part_D=forward_part_D,
        handling_s_D=np.array([_handling_s(p.link, task) if several else 0.0 for p in profiles]),
        latency_D=costs.latency_D,
        s_per_byte_D=costs.s_per_byte_D,
        weights_N1=amounts(frozen_bytes, frozen_L)
        + task.stepped_bytes * amounts(task.trained, trained_L)
        + in_first * (task.tables.bytes + task.stepped_bytes * shared_elements + passing_bytes),
        graphs_DN1=np.stack(
            [
                by_link(np.full(L, p.attention_bytes(task.heads)), np.full(L, p.mlp_bytes(task.columns)))
                * scale
                * task.longest_part
                for p in profiles
            ]
        ),
        trained_N1=amounts(task.trained, trained_L) + in_first * (task.tables.elements + shared_elements),
        optimizer_s_D2=np.array([(p.optimizer_s.alpha, p.optimizer_s.beta) for p in profiles]),
        fixed_D=np.array(
            [
                p.runtime_bytes
                + several * _COMING * task.message_bytes * task.longest_part
                + (OWNER_BYTES if p.device in owners else 0)
                for p in profiles
            ]
        ),
        # of a table at both ends, the optimizer's moments are at the first
        head_bytes=task.weights.vocab_row * task.vocab_rows - 2 * table_bytes + passing_bytes + task.head_work_bytes,
        available_D=costs.available_D,
        links_together=decoder.links_together,
    )


def _evenly(count: int, among: range) -> Floats:
    """``[count]`` parts of one, even among some and 0 elsewhere."""
    return np.array([(i in among) / max(1, len(among)) for i in range(count)])


def rows_a_turn(job: Job, work: Work, owners: int) -> int:
    """Rows that an owner brings to a step; fewer than the job's where measuring has found fewer examples."""
    rows = math.ceil(job.batch_size / owners)
    return rows if job.micro_batch_size else min(rows, work.rows * job.half_batches)


def _handling_s(link: Link | None, task: Task) -> float:
    if link is None or not link.covered_bytes:
        return 0.0
    both_ways_bytes = link.covered_bytes * 2 * (link.world_size - 1) / link.world_size
    return task.message_bytes * link.covered_s / both_ways_bytes / 2
