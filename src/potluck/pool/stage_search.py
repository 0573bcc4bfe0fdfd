"""The stages with the shortest simulated step, for devices in a given order and micro-batches of one size.

With ``P`` stages, ``M`` micro-batches, walks ``w`` of one of them both ways and messages ``m`` behind each stage:

1. A stage cannot begin before the stages before it have walked one micro-batch forward, and these end only when they
   have walked the last one back:  ``step >= sum over k < s of (w_k + 2 m_k) + M w_s + optimizer_s``  for each stage.
2. The first stage has at most ``P`` micro-batches on their way:  ``step >= ceil(M / P) * sum of (w_k + 2 m_k)``.
3. Stage ``s`` walks ``min(P - s, M)`` times forward before it walks back for the first time, and for that the stages
   after it must have walked both ways.

Stages that end below the lowest trained link get no gradient and wait for none: of the first they add their walk
forward, and the second and third are those of the stages after them.

The stages for which the first is least are found by a dynamic program over links, from the last stage to the first:
what comes before a stage adds the same to all after it. They are usually the best or next to it. Cuts between them are
then moved while that helps, and what may still be better is tried by branch and bound.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from potluck.pool.cost import Floats
from potluck.pool.stage_costs import Stage, StageCosts

_SAME = 1e-4
"""A step shorter by no more than this part is no better: the search ends there."""
_WALKS_A_BOUND = 20


@dataclass
class Budget:
    """How many walks may still be simulated; what else is tried counts as walks that take as long."""

    walks: int

    @property
    def spent(self) -> bool:
        """Whether none is left."""
        return self.walks <= 0


class Bounds:
    """Lower bounds of steps with micro-batches of one size, by the devices from some stage to the last."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs
        self.last_part = costs.parts[-1]
        self.walks_DNN = np.stack([costs.walks_s(d) for d in range(len(costs.names))])
        alpha_D, beta_D = costs.optimizer_s_D2.T
        trained_NN = costs.trained_N1[None, :] - costs.trained_N1[:, None]
        optimizer_DNN = alpha_D[:, None, None] + beta_D[:, None, None] * trained_NN
        self.whole_DNN = sum(costs.parts) * self.walks_DNN + optimizer_DNN
        self._fitting: dict[tuple[int, int], Floats] = {}
        self._ramps: dict[tuple[int, int], Floats] = {}
        self._of: dict[tuple[int, ...], Floats] = {}
        self._trips: dict[tuple[int, ...], Floats] = {}
        self._counted: dict[int, float] = {}

    def whole_s(self, device: int, from_end: int) -> Floats:
        """``[N + 1, N + 1]`` seconds of a device's whole step, infinite where the links do not fit."""
        key = device, min(from_end, len(self.costs.rows))
        if key not in self._fitting:
            short = self.costs.impossible_NN | (self.costs.memories(*key) > self.costs.available_D[device])
            self._fitting[key] = np.where(short, np.inf, self.whole_DNN[device])
        return self._fitting[key]

    def ramp_s(self, device: int, after: int) -> Floats:
        """``[N + 1, N + 1]`` seconds by which a device and its message delay the stages after it: the first micro-batch
        forward, the last one back."""
        if (device, after) not in self._ramps:
            forward = min(0.5, self.costs.forward_part_D[device])  # handling messages is half forward
            walked_NN = self.walks_DNN[device] * (forward + (1 - forward) * self.last_part)
            back_N1 = self.last_part * self.costs.gradients_N1
            self._ramps[device, after] = walked_NN + (1 + back_N1) * self.costs.message_s(device, after)
        return self._ramps[device, after]

    def of(self, devices: tuple[int, ...]) -> Floats:
        """``[N + 1]``: no step of these devices, with the links from the index to the last, is shorter."""
        if devices not in self._of:
            whole_NN = self.whole_s(devices[0], len(devices))
            if len(devices) > 1:
                rest_NN = self.ramp_s(*devices[:2]) + self.of(devices[1:])
                self._of[devices] = np.maximum(whole_NN, rest_NN).min(1)
            else:
                self._of[devices] = whole_NN[:, -1]
        return self._of[devices]

    def trip(self, devices: tuple[int, ...]) -> Floats:
        """``[N + 1]``: in no less time does a whole micro-batch walk the links from the index on, both ways, as far as
        stages wait for it to come back."""
        if devices not in self._trips:
            fits_NN = np.isfinite(self.whole_s(devices[0], len(devices)))
            trip_NN = np.where(fits_NN, self.walks_DNN[devices[0]] * self.costs.gradients_N1, np.inf)
            if len(devices) > 1:
                messages_N1 = 2 * self.costs.message_s(*devices[:2]) * self.costs.gradients_N1
                self._trips[devices] = (trip_NN + messages_N1 + self.trip(devices[1:])).min(1)
            else:
                self._trips[devices] = trip_NN[:, -1]
        return self._trips[devices]

    def trips(self, stages: int) -> float:
        """How many whole ones follow each other."""
        if stages not in self._counted:
            parts = self.costs.parts
            self._counted[stages] = max(sum(parts[first::stages]) for first in range(stages))
        return self._counted[stages]

    def least_step_s(self, devices: tuple[int, ...]) -> float:
        """No step of these devices is shorter."""
        return float(max(self.of(devices)[0], self.trips(len(devices)) * self.trip(devices)[0]))

    def first_guess(self, devices: tuple[int, ...]) -> list[Stage] | None:
        """The stages whose bound is least; None where none fit."""
        start, stages = 0, []
        if not np.isfinite(self.of(devices)[0]):
            return None
        for s, device in enumerate(devices[:-1]):
            whole_N1 = self.whole_s(device, len(devices) - s)[start]
            rest_N1 = self.ramp_s(device, devices[s + 1])[start] + self.of(devices[s + 1 :])
            stop = int(np.maximum(whole_N1, rest_N1).argmin())
            stages.append(Stage(device, start, stop))
            start = stop
        return [*stages, Stage(devices[-1], start, self.costs.links)]

    def tighter(self, stages: Sequence[Stage]) -> float:
        """A bound of a step with all its stages known."""
        costs, parts = self.costs, self.costs.parts
        P, M = len(stages), len(parts)
        walks = [costs.walk_s(stage) for stage in stages]
        messages = [costs.message_s(a.device, b.device) for a, b in pairwise(stages)] + [0.0]
        waits = [bool(costs.gradients_N1[stage.stop]) for stage in stages]
        after = sum(
            wait * (forward + backward + 2 * message)
            for wait, (forward, backward), message in zip(waits, walks, messages, strict=True)
        )
        before, least = 0.0, self.trips(P) * after
        for s, (stage, wait, (forward, backward), message) in enumerate(
            zip(stages, waits, walks, messages, strict=True)
        ):
            whole = float(self.whole_DNN[stage.device, stage.start, stage.stop])
            if wait:
                after -= forward + backward
                ahead = (sum(parts[: min(P - s, M)]) - 1) * forward
                least = max(least, before + whole + max(0.0, after - ahead))
                after -= 2 * message
            else:
                least = max(least, before + whole)
            before += forward + message + self.last_part * (backward + wait * message)
        return least


def improved(bounds: Bounds, stages: list[Stage], budget: Budget) -> tuple[float, list[Stage]]:
    """A step and its stages after each move of a cut, or swap of neighbours, that makes it shorter, until none does."""
    best_s, best = step_s(bounds.costs, stages, budget), stages
    while True:
        tried = [(step_s(bounds.costs, each, budget), each) for each in _moved(bounds, best)]
        shortest_s, shortest = min(tried, key=lambda each: each[0], default=(math.inf, best))
        if shortest_s >= best_s:
            return best_s, best
        best_s, best = shortest_s, shortest


def _moved(bounds: Bounds, stages: Sequence[Stage]) -> Iterator[list[Stage]]:
    """Stages that fit into memory, with one cut elsewhere or two neighbours swapped."""
    P = len(stages)
    for s in range(P - 1):
        for by in (-1, 1, -2, 2, -3, 3):
            cut = stages[s].stop + by
            if stages[s].start < cut < stages[s + 1].stop:
                pair = (replace(stages[s], stop=cut), replace(stages[s + 1], start=cut))
                fits = (bounds.whole_s(each.device, P - at)[each.start, each.stop] for at, each in enumerate(pair, s))
                if all(map(math.isfinite, fits)):
                    yield [*stages[:s], *pair, *stages[s + 2 :]]
        order = [stage.device for stage in stages]
        order[s : s + 2] = reversed(order[s : s + 2])
        if (swapped := bounds.first_guess(tuple(order))) is not None:
            yield swapped


def shorter_stages(
    bounds: Bounds, devices: tuple[int, ...], below_s: float, budget: Budget
) -> Iterator[tuple[float, list[Stage]]]:
    """Stages of these devices with their steps, each shorter than ``below_s`` and than those before; the last is best.

    A step is that of :meth:`StageCosts.simulated` and the slowest optimizer, without the messages of the whole group.
    """
    costs, P = bounds.costs, len(devices)

    def divided(start: int, before_s: float, trip_s: float, so_far: list[Stage]) -> Iterator[tuple[float, list[Stage]]]:
        nonlocal below_s
        device, s = devices[len(so_far)], len(so_far)
        if s == P - 1:
            stages = [*so_far, Stage(device, start, costs.links)]
            budget.walks -= _WALKS_A_BOUND
            if bounds.tighter(stages) < below_s * (1 - _SAME):
                found_s = step_s(costs, stages, budget)
                if found_s < below_s:
                    below_s = found_s
                    yield found_s, stages
            return
        budget.walks -= _WALKS_A_BOUND
        after = devices[s + 1 :]
        ramp_N1 = before_s + bounds.ramp_s(device, after[0])[start]
        whole_N1 = before_s + bounds.whole_s(device, P - s)[start]
        there_and_back_N1 = bounds.walks_DNN[device, start] + 2 * costs.message_s(device, after[0])
        trip_N1 = trip_s + there_and_back_N1 * costs.gradients_N1
        trips_N1 = bounds.trips(P) * (trip_N1 + bounds.trip(after))
        least_N1 = np.maximum(np.maximum(whole_N1, trips_N1), ramp_N1 + bounds.of(after))
        for stop in np.argsort(least_N1, kind="stable"):
            if least_N1[stop] >= below_s * (1 - _SAME) or budget.spent:
                return
            stage = Stage(device, start, int(stop))
            yield from divided(stage.stop, float(ramp_N1[stop]), float(trip_N1[stop]), [*so_far, stage])

    yield from divided(0, 0.0, 0.0, [])


def step_s(costs: StageCosts, stages: Sequence[Stage], budget: Budget) -> float:
    """Seconds of a step but for the messages of the whole group; infinite where the budget is spent."""
    if budget.spent:
        return math.inf
    budget.walks -= 2 * len(stages) * len(costs.rows)
    return costs.simulated(stages).step_s + max(costs.once_s(stages)[0])
