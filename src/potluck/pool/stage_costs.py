"""What ranges of links cost as stages of a pipeline: seconds, waiting, memory and bytes.

The chain has two links a block: ``2 i`` is attention of block ``i``, ``2 i + 1`` its MLP. A micro-batch of ``R`` rows
takes a link a part of its measured seconds (``Profile.part_of``), the head (on the last stage) likewise. Between two
stages ``[R, S, D]`` travels, the stream forward and its gradient back:

    message = latency + bytes * s_per_byte        of the slower of the two links

Links below the lowest trained one are walked forward alone, and no gradient is sent to stages that end there.

After the last walk come the norm, the optimizer (at once on all stages) and the clocks. A trained table that both ends
have (the embedding that is the head) is stepped by the first stage, between a message of its gradients and one of its
values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from potluck.pool.cost import Bools, DevicePrediction, Floats, Prediction
from potluck.pool.profile import Work
from potluck.pool.simulate import Simulated, simulate
from potluck.pool.task import ID_BYTES, Task

_GROUP_MESSAGES = 2
"""Of all stages: norm and loss, clocks. Layouts come beside, two messages an owner."""


@dataclass(frozen=True)
class Stage:
    """Consecutive links of one device."""

    device: int
    """Its place among the profiles."""
    start: int
    stop: int


@dataclass(frozen=True)
class StageCosts:
    """Several devices (``D``) and all links (``N``), for micro-batches of one size; sums from the first link on."""

    task: Task
    """Of one micro-batch that walks alone."""
    work: Work
    """Of one micro-batch."""
    names: tuple[str, ...]
    owners: frozenset[str]
    rows: tuple[int, ...]
    """Of each micro-batch of a step; the first has most."""
    forward_DN1: Floats
    """``[D, N + 1]`` seconds of links walked forward."""
    backward_DN1: Floats
    """The same backward; without the head."""
    head_s_D: Floats
    forward_part_D: Floats
    """Of links that are walked both ways."""
    handling_s_D: Floats
    """Of one message, sent or received."""
    latency_D: Floats
    s_per_byte_D: Floats
    weights_N1: Floats
    """``[N + 1]`` bytes of weights, and of gradients and optimizer state."""
    graphs_DN1: Floats
    """``[D, N + 1]`` bytes that one micro-batch in flight keeps."""
    trained_N1: Floats
    """``[N + 1]`` elements that the optimizer steps."""
    optimizer_s_D2: Floats
    """For nothing, and of one element."""
    fixed_D: Floats
    """Bytes of a device without links."""
    head_bytes: float
    available_D: Floats
    links_together: int = 1
    """Between which the chain is not divided."""

    @cached_property
    def links(self) -> int:
        """Of the whole chain."""
        return len(self.weights_N1) - 1

    @cached_property
    def seconds_DN1(self) -> Floats:
        """``[D, N + 1]`` forward and backward together; without the head."""
        return self.forward_DN1 + self.backward_DN1

    @cached_property
    def gradients_N1(self) -> Floats:
        """``[N + 1]``: 1 where a gradient goes back over a border there, as something before it is trained; else 0."""
        return (np.arange(self.links + 1) > self.task.lowest).astype(np.float64)

    @cached_property
    def impossible_NN(self) -> Bools:
        """Which pairs of indices are no stage: no links, or a cut where the chain is not divided."""
        between_N1 = np.arange(self.links + 1) % self.links_together > 0
        return np.asarray(np.tri(self.links + 1, dtype=np.bool_) | between_N1[:, None] | between_N1)

    @cached_property
    def parts(self) -> list[float]:
        """Rows of each micro-batch by those of the first."""
        return [rows / self.rows[0] for rows in self.rows]

    def message_s(self, a: int, b: int) -> float:
        """Seconds of a whole micro-batch's message between two devices."""
        return self._between_s(a, b, self.task.message_bytes)

    def _between_s(self, a: int, b: int, size: float) -> float:
        latency = max(self.latency_D[a], self.latency_D[b])
        return float(latency + size * max(self.s_per_byte_D[a], self.s_per_byte_D[b]))

    def walk_s(self, stage: Stage) -> tuple[float, float]:
        """Forward and backward seconds of a whole micro-batch."""
        d = stage.device
        forward, backward = (
            s_DN1[d, stage.stop] - s_DN1[d, stage.start] for s_DN1 in (self.forward_DN1, self.backward_DN1)
        )
        before, behind = stage.start > 0, stage.stop < self.links
        streams = float(before) + float(behind)
        gradients = self.gradients_N1[stage.start] * before + self.gradients_N1[stage.stop] * behind
        head = 0.0 if behind else self.head_s_D[d]
        handling = self.handling_s_D[d]
        return float(forward + handling * streams), float(backward + handling * gradients + head)

    def walks_s(self, device: int) -> Floats:
        """``[N + 1, N + 1]`` seconds, both ways, of one device with links from the first index to the second."""
        seconds_N1 = self.seconds_DN1[device]
        handled_N1 = self.handling_s_D[device] * (1 + self.gradients_N1)
        before_N1, behind_N1 = handled_N1.copy(), handled_N1.copy()
        before_N1[0], behind_N1[-1] = 0.0, self.head_s_D[device]
        return np.asarray(seconds_N1[None, :] - seconds_N1[:, None] + before_N1[:, None] + behind_N1[None, :])

    def memory(self, stage: Stage, in_flight: int) -> float:
        """Bytes of a stage through which ``in_flight`` micro-batches are on their way."""
        return float(self.memories(stage.device, in_flight)[stage.start, stage.stop])

    def memories(self, device: int, in_flight: int) -> Floats:
        """``[N + 1, N + 1]`` bytes of one device with links from the first index to the second."""
        task = self.task
        graphs_N1 = self.graphs_DN1[device]
        walked_back_N1 = np.maximum(0, np.arange(self.links + 1) - task.lowest)
        kept_N1 = walked_back_N1 * task.kept_bytes / 2 if task.checkpointing else graphs_N1 - graphs_N1[task.lowest]
        kept_N1 = np.maximum(0.0, kept_N1)
        held_N1 = self.weights_N1 + in_flight * kept_N1
        leaving_bytes = (2 * in_flight + 1) * task.message_bytes * task.longest_part * (len(self.names) > 1)
        going_back = np.diff(graphs_N1).max()
        bytes_NN = held_N1[None, :] - held_N1[:, None] + self.fixed_D[device] + leaving_bytes + going_back
        bytes_NN[:, -1] += self.head_bytes
        return np.asarray(bytes_NN)

    def simulated(self, stages: Sequence[Stage], *, messages: bool = True) -> Simulated:
        """One step's walks; ``messages`` take no time if False."""
        parts = self.parts
        walks = [self.walk_s(stage) for stage in stages]
        between, sends_back = [], []
        for a, b in pairwise(stages):
            latency = max(self.latency_D[a.device], self.latency_D[b.device])
            rest = self.message_s(a.device, b.device) - latency
            between.append([messages * float(latency + rest * part) for part in parts])
            sends_back.append(bool(self.gradients_N1[a.stop]))
        return simulate(
            [[forward * part for part in parts] for forward, _ in walks],
            [[backward * part for part in parts] for _, backward in walks],
            len(parts),
            between,
            sends_back,
        )

    def once_s(self, stages: Sequence[Stage]) -> tuple[list[float], float]:
        """Seconds of each stage's optimizer, and of the messages of the whole group."""
        optimizer_s = [
            float(np.dot(self.optimizer_s_D2[s.device], (1, self.trained_N1[s.stop] - self.trained_N1[s.start])))
            for s in stages
        ]
        count = _GROUP_MESSAGES + 2 * len(self.owners) if len(stages) > 1 else 0
        group_s = count * float(max(self.latency_D[s.device] for s in stages))
        if (table_bytes := self.task.tables.at_both_ends_bytes) and len(stages) > 1:
            # gradients there, values back
            group_s += 2 * self._between_s(stages[0].device, stages[-1].device, table_bytes)
        return optimizer_s, group_s

    def bytes_sent(self, stage: Stage) -> float:
        """In a step: streams and gradients to neighbours, and an owner's ids and labels to the ends of the chain."""
        is_first, is_last = stage.start == 0, stage.stop == self.links
        owned_parts = sum(self.parts) / len(self.owners) * (self.names[stage.device] in self.owners)
        ids, labels = self.work.rows * self.work.length, self.work.supervised
        messages = self.gradients_N1[stage.start] * (not is_first) + (not is_last)
        between = float(sum(self.parts) * self.task.message_bytes * messages)
        between += self.task.tables.at_both_ends_bytes * (is_first != is_last)
        return between + owned_parts * ID_BYTES * (ids * (not is_first) + labels * (not is_last))


def predict_stages(costs: StageCosts, stages: Sequence[Stage]) -> Prediction:
    """What a step of these stages, in the order of the chain, is expected to take; devices in the order of ``costs``.

    A stage that its neighbours keep from computing waits, be it for their compute or for their message.
    """
    P = len(stages)
    run = costs.simulated(stages)
    optimizer_s, group_s = costs.once_s(stages)
    step_s = run.step_s + max(optimizer_s) + group_s
    devices = {
        stage.device: DevicePrediction(
            costs.names[stage.device],
            compute_s=run.busy_s[s] + optimizer_s[s],
            wait_s=max(0.0, step_s - group_s - run.busy_s[s] - optimizer_s[s]),
            memory_bytes=costs.memory(stage, min(P - s, len(costs.rows))),
            available_bytes=float(costs.available_D[stage.device]),
            bytes_sent=costs.bytes_sent(stage),
        )
        for s, stage in enumerate(stages)
    }
    listed = tuple(devices[d] for d in sorted(devices))
    waited = math.fsum(device.wait_s for device in listed)
    message_s = run.step_s - costs.simulated(stages, messages=False).step_s + group_s
    return Prediction(step_s, waited / (P * step_s) if step_s else 0.0, message_s, listed)
