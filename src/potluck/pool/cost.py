"""What a step costs with given shares: seconds, waiting and memory, from the devices' profiles.

A barrier follows each segment (attention, MLP, head), so a step takes the *sum of the slowest device's* seconds over
segments, plus what the messages take that no compute covers:

    step = micro_batches * ( half_batches * (layers * (T_attention + e_attention) + ... + T_head) + messages ) + once

Links below the lowest trained one are walked forward alone: of them ``p T`` is computed, and one message sent.

- ``T = max over devices of alpha + beta * units``; a device without units still pays ``alpha``, the replicated work.
- With two half-batches in flight, the other half's compute covers a message. A segment whose part ``p`` is forward
  sends one message ``m`` after each part, so ``e = max(0, m - p T) + max(0, m - (1 - p) T)``; with one half ``2 m``.
  ``T + e`` never falls as ``T`` grows, so the smallest ``T`` of each segment is the best for any group of devices.
- The optimizer's seconds by unit are spread over the segments of those units, as if they passed there. Where shares
  are balanced this is the same as a barrier of its own; it keeps the three decisions separate.
- Handling messages delays the compute that covers them, by what was measured (``Link.covered_s``).
- A message that reduces ``b`` bytes over ``n`` devices takes ``latency + 2 (n - 1) / n * b * s_per_byte`` (ring), one
  that gathers ``b`` from each ``(n - 1) b``, a broadcast ``ceil(log2 n) b`` (tree); values leave all homes at
  once, ``(n - 1) / n`` of them each way. A group is as slow as its slowest latency and its slowest link.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from potluck.errors import BadInput
from potluck.pool.profile import Line, Link, Profile
from potluck.pool.sent import bytes_sent, messages
from potluck.pool.task import Task

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Bools: TypeAlias = NDArray[np.bool_]

OWNER_BYTES = 90 << 20
"""What a device with data holds beside: transformers, its tokenizer, examples (77 MiB were seen: bench.memory)."""
_SMALLEST_BETA_S = 1e-15


@dataclass(frozen=True)
class Units:
    """How many units of each kind one device holds."""

    heads: int
    columns: int
    vocab_rows: int


@dataclass(frozen=True)
class DevicePrediction:
    """One device's part of a predicted step."""

    name: str
    compute_s: float
    wait_s: float
    """Waiting for slower devices."""
    memory_bytes: float
    available_bytes: float
    bytes_sent: float = 0.0
    """To other devices."""


@dataclass(frozen=True)
class Prediction:
    """What a step is expected to take."""

    step_s: float
    idle_ratio: float
    """Sum of ``wait_s`` over devices, as a part of their number times ``step_s``."""
    message_s: float
    """Messages that no compute covers."""
    devices: tuple[DevicePrediction, ...]

    @property
    def missing_bytes(self) -> float:
        """Memory missing where most is missing; 0 if none is."""
        return max(0.0, *(device.memory_bytes - device.available_bytes for device in self.devices))


@dataclass(frozen=True)
class Costs:
    """Several devices' profiles as arrays, one row a device (``D``); the three segments are the last dimension."""

    task: Task
    names: tuple[str, ...]
    alpha_D3: Floats
    beta_D3: Floats
    once_alpha_D: Floats
    """Of the optimizer, for nothing but the tables that this device alone has."""
    once_beta_D: Floats
    """Of the optimizer, for the replicated tensors, if one device stepped them all."""
    latency_D: Floats
    s_per_byte_D: Floats
    """Of raw bytes on the wire."""
    forward_part: float
    """Of the first device, which stands for all."""
    memory_D: Floats
    """Of a device without units."""
    head_bytes_D: Floats
    column_bytes_D: Floats
    available_D: Floats

    @property
    def kv_bytes(self) -> float:
        """Weights of one key/value head."""
        return self.task.weights.kv_head

    @property
    def row_bytes(self) -> float:
        """Weights of one vocabulary row."""
        return self.task.weights.vocab_row

    @property
    def times_3(self) -> Floats:
        """How often each segment is computed in a step, forward and backward together."""
        task = self.task
        return task.micro_batches * task.half_batches * np.array([*task.both_ways(self.forward_part), 1.0])

    @property
    def ways(self) -> list[tuple[float, Floats]]:
        """Forward and backward: the part of a segment's seconds, and how often attention and MLP are walked so."""
        task = self.task
        half_walks = task.micro_batches * task.half_batches
        return [
            (self.forward_part, half_walks * np.array([task.layers, task.mlp_layers])),
            (1 - self.forward_part, half_walks * np.array(task.walks_back)),
        ]

    def once_D(self, world_size: Floats) -> Floats:
        """``[..., D]`` seconds of the optimizer that depend on no share; replicated tensors are stepped in turn."""
        return np.asarray(self.once_alpha_D + self.once_beta_D / world_size[..., None])

    def memory(self, units_MD3: Integers, world_size_M: Floats) -> Floats:
        """``[M, D]`` bytes of each device."""
        heads_MD, columns_MD, rows_MD = np.moveaxis(units_MD3, -1, 0)
        in_flight_M = np.where(world_size_M > 1, buffers_bytes(self.task), 0.0)
        return np.asarray(
            self.memory_D
            + in_flight_M[:, None]
            + self.head_bytes_D * heads_MD
            + self.kv_bytes * kv_held(heads_MD, self.task)
            + self.column_bytes_D * columns_MD
            + self.row_bytes * rows_MD
        )

    def segments(self, members_MD: Bools, units_MD3: Integers) -> Floats:
        """``[M, 3]``: seconds of the slowest member in each segment."""
        t_MD3 = self.alpha_D3 + self.beta_D3 * units_MD3
        return np.asarray(np.where(members_MD[..., None], t_MD3, 0.0).max(1))

    def steps(self, members_MD: Bools, T_M3: Floats) -> tuple[Floats, Floats]:
        """``[M]`` seconds of a step whose segments take ``T_M3``, and of these the messages that nothing covers."""
        n_M = members_MD.sum(1).astype(np.float64)
        latency_M = np.where(members_MD, self.latency_D, 0.0).max(1)
        s_per_byte_M = np.where(members_MD, self.s_per_byte_D, 0.0).max(1)
        once_M = np.where(members_MD, self.once_D(n_M), 0.0).max(1)
        sent = messages(self.task, n_M)
        message_M = latency_M + sent.link_bytes * s_per_byte_M
        pair_M = latency_M + sent.pair_bytes * s_per_byte_M
        message_s = sent.count * latency_M + sent.bytes * s_per_byte_M
        times = self.times_3
        for part, walks_2 in self.ways:
            covered = 0.0 if self.task.half_batches == 1 else part
            uncovered_M2 = np.maximum(0.0, message_M[:, None] - covered * T_M3[:, :2])
            message_s = message_s + uncovered_M2 @ walks_2
        if self.task.half_batches > 1:
            message_s = message_s + self.task.micro_batches * np.maximum(0.0, pair_M - T_M3[:, 2])
        message_s = np.where(n_M > 1, message_s, 0.0)
        return np.asarray(T_M3 @ times + once_M + message_s), np.asarray(message_s)


def buffers_bytes(task: Task) -> float:
    """Of messages in flight: each half's copy and what Gloo makes of it, forward answer and backward message."""
    return 4 * task.half_batches * task.message_bytes * task.longest_part + 2 * task.partial_bytes


def kv_held(heads: Integers, task: Task) -> Integers:
    """Key/value heads that consecutive query heads read at most, wherever they begin."""
    group = task.group
    touched = (heads + 2 * group - 2) // group
    return np.asarray(np.where(heads > 0, np.minimum(touched, task.kv_heads), 0))


def costs_of(task: Task, profiles: Sequence[Profile], owners: Collection[str]) -> Costs:
    """Arrange profiles as arrays; the first device is the coordinator, and an owner's memory is counted for it too.

    Raises:
        BadInput: several devices, and one of them has no link.
    """
    coordinator = profiles[0].device
    links = [profile.link for profile in profiles]
    for profile in profiles:
        if profile.link is None and len(profiles) > 1:
            raise BadInput(f"The profile of {profile.device} has no link: measure it, or name one with --link.")
    trained = task.trained
    walks = task.micro_batches * task.half_batches
    head_elements = trained.head + trained.kv_head / task.group
    attention, mlp = (max(times, 1e-9) for times in task.both_ways(profiles[0].forward_part))
    per_walk = np.array([head_elements / attention, trained.column / mlp, trained.vocab_row]) / walks
    lines = [(p.attention_s, p.mlp_s, head_s(task, p)) for p in profiles]
    tables_D = np.array([p.device == coordinator for p in profiles]) * task.tables.elements
    # one more while a piece goes back
    graphs_2 = [(0 if task.checkpointing else links * task.half_batches) + 1 for links in task.graphs]
    attention_graphs, mlp_graphs = (graphs * task.longest_part for graphs in graphs_2)
    kept = task.kept_bytes * sum(task.graphs) / 2 * task.half_batches if task.checkpointing else 0.0
    fixed = kept + task.head_work_bytes + task.weights.replicated
    return Costs(
        task=task,
        names=tuple(p.device for p in profiles),
        alpha_D3=np.array([[line.alpha for line in each] for each in lines]) + _handling_D3(task, links),
        beta_D3=np.maximum(
            _SMALLEST_BETA_S,
            np.array([[line.beta for line in each] for each in lines])
            + np.array([p.optimizer_s.beta for p in profiles])[:, None] * per_walk,
        ),
        once_alpha_D=np.array([p.optimizer_s(elements) for p, elements in zip(profiles, tables_D, strict=True)]),
        once_beta_D=np.array([p.optimizer_s.beta * trained.replicated for p in profiles]),
        latency_D=np.array([link.latency_s if link else 0.0 for link in links]),
        s_per_byte_D=np.array([_s_per_byte(link) if link else 0.0 for link in links]),
        forward_part=profiles[0].forward_part,
        memory_D=np.array(
            [
                p.runtime_bytes
                + fixed
                + attention_graphs * p.attention_bytes.alpha
                + mlp_graphs * p.mlp_bytes.alpha
                + (OWNER_BYTES if p.device == coordinator or p.device in owners else 0)
                + (task.tables.bytes if p.device == coordinator else 0)
                for p in profiles
            ]
        ),
        head_bytes_D=task.weights.head + attention_graphs * np.array([p.attention_bytes.beta for p in profiles]),
        column_bytes_D=task.weights.column + mlp_graphs * np.array([p.mlp_bytes.beta for p in profiles]),
        available_D=np.array([float(p.available_bytes) for p in profiles]),
    )


def head_s(task: Task, profile: Profile) -> Line:
    """Seconds of the head as the task has it, by vocabulary rows; measured is one that is not trained."""
    return Line(alpha=profile.head_s.alpha, beta=profile.head_s.beta * task.head_passes)


def _handling_D3(task: Task, links: Sequence[Link | None]) -> Floats:
    """``[D, 3]``: what handling messages adds to each segment, in proportion to their bytes; nothing for one device."""
    if len(links) == 1:
        return np.zeros((1, 3))
    sent_3 = np.array([2 * task.message_bytes, 2 * task.message_bytes, task.pair_bytes + task.head_message_bytes])
    s_per_byte_D = [link.covered_s / link.covered_bytes if link and link.covered_bytes else 0.0 for link in links]
    return np.outer(s_per_byte_D, sent_3)


def _s_per_byte(link: Link) -> float:
    world_size = max(2, link.world_size)
    return world_size / (2 * (world_size - 1) * link.bytes_per_s)


def predict(
    task: Task, profiles: Sequence[Profile], units: Sequence[Units], *, owners: Collection[str] = ()
) -> Prediction:
    """What a step of these devices, with these shares, is expected to take; see the module's text.

    Args:
        task: the step.
        profiles: of the devices that take part, coordinator first.
        units: what each of them holds.
        owners: names of devices that have data, the coordinator always among them.

    Raises:
        BadInput: several devices, and one of them has no link.
    """
    costs = costs_of(task, profiles, owners)
    members_MD = np.ones((1, len(profiles)), dtype=np.bool_)
    units_MD3 = np.array([[[u.heads, u.columns, u.vocab_rows] for u in units]], dtype=np.int64)
    T_M3 = costs.segments(members_MD, units_MD3)
    step_M, message_M = costs.steps(members_MD, T_M3)
    world_size_M = np.array([float(len(profiles))])
    once_D = costs.once_D(world_size_M)[0]
    compute_D = (costs.alpha_D3 + costs.beta_D3 * units_MD3[0]) @ costs.times_3 + once_D
    busiest = float(T_M3[0] @ costs.times_3 + once_D.max())
    memory_D = costs.memory(units_MD3, world_size_M)[0]
    step_s = float(step_M[0])
    devices = [
        DevicePrediction(name, float(compute_s), max(0.0, busiest - float(compute_s)), float(memory), float(free), sent)
        for name, compute_s, memory, free, sent in zip(
            costs.names, compute_D, memory_D, costs.available_D, bytes_sent(task, costs.names, owners), strict=True
        )
    ]
    waited = math.fsum(device.wait_s for device in devices)
    return Prediction(step_s, waited / (len(devices) * step_s) if step_s else 0.0, float(message_M[0]), tuple(devices))
