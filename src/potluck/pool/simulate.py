"""1F1B pipelines, event by event: when each stage computes, and when it stands still.

A walk begins when the one before it on this stage has ended and what it needs has come: the stream from the stage
before, the gradient from the stage after. A message leaves as soon as

- the walk that makes it has ended (the sender does not wait for it),
- the message before it, between the same two stages the same way, has arrived, and
- its receiver expects it: a stage expects one message more of each kind than it has taken up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from potluck.pool.strategies.schedule import one_forward_one_backward

Seconds: TypeAlias = float | Sequence[float]
"""Of every micro-batch alike, or of each."""


@dataclass(frozen=True)
class Simulated:
    """What a step of a pipeline is expected to take, beside what follows the last walk."""

    step_s: float
    busy_s: tuple[float, ...]
    """Of each stage: the sum of its walks."""

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Of each stage: it waits for a message, or has ended before the others."""
        return tuple(self.step_s - busy_s for busy_s in self.busy_s)


def simulate(
    forward_s: Sequence[Seconds],
    backward_s: Sequence[Seconds],
    micro_batches: int,
    message_s: Sequence[Seconds] = (),
    sends_back: Sequence[bool] = (),
) -> Simulated:
    """Seconds of one step, from the first walk to the last.

    Args:
        forward_s: of each stage's walk forward, in the order of the chain.
        backward_s: of each stage's walk backward; the last one's begins when it has walked forward.
        micro_batches: of the step.
        message_s: between each two neighbours, alike in both directions; nothing if left out.
        sends_back: between each two neighbours, whether a gradient goes back; the stages before one that does not have
            nothing to walk back through. Everywhere if left out.

    Raises:
        ValueError: the numbers of stages differ, or there is no stage or no micro-batch.
    """
    P, M = len(forward_s), micro_batches
    if P < 1 or M < 1 or len(backward_s) != P or len(message_s) not in (0, P - 1):
        raise ValueError(f"no pipeline: {P} stages, {len(backward_s)} backward, {len(message_s)} links, {M} batches")
    takes = (_each(forward_s, M), _each(backward_s, M))
    travels = _each(message_s or [0.0] * (P - 1), M)
    orders = [list(one_forward_one_backward(s, P, M)) for s in range(P)]
    ended: tuple[list[list[float]], ...] = ([[] for _ in range(P)], [[] for _ in range(P)])
    taken_up = ([0.0] * P, [0.0] * P)  # when each stage began with the last message of either kind
    arrived = ([0.0] * P, [0.0] * P)
    done, clocks = [0] * P, [0.0] * P
    while any(done[s] < 2 * M for s in range(P)):
        for s in range(P):
            while done[s] < 2 * M:
                direction, m = orders[s][done[s]]
                way, source, wire = (0, s - 1, s - 1) if direction == "forward" else (1, s + 1, s)
                start = clocks[s]
                if 0 <= source < P and (direction == "forward" or not sends_back or sends_back[wire]):
                    if len(ended[way][source]) <= m:
                        break
                    leaves = max(ended[way][source][m], arrived[way][s], taken_up[way][s])
                    arrived[way][s] = leaves + travels[wire][m]
                    start = taken_up[way][s] = max(start, arrived[way][s])
                clocks[s] = start + takes[way][s][m]
                ended[way][s].append(clocks[s])
                done[s] += 1
    busy = tuple(sum(takes[0][s]) + sum(takes[1][s]) for s in range(P))
    return Simulated(max(clocks), busy)


def _each(seconds: Sequence[Seconds], micro_batches: int) -> list[list[float]]:
    """``[stage][micro-batch]``."""
    listed = [[s] * micro_batches if isinstance(s, int | float) else list(s) for s in seconds]
    if any(len(each) != micro_batches for each in listed):
        raise ValueError(f"seconds of each of {micro_batches} micro-batches, or one number for all")
    return listed
