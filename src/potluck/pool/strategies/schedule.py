"""In which order a stage of a pipeline walks a step's micro-batches: 1F1B (Narayanan et al., 2019)."""

from collections.abc import Iterator
from typing import Literal

Walk = Literal["forward", "backward"]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[tuple[Walk, int]]:
    """Each walk of a stage with its micro-batch, in order.

    A stage walks ``stages - 1 - stage`` micro-batches forward to fill those after it, then one forward and one backward
    in turn, then back through what is left; so at most ``stages - stage`` micro-batches lie between their two walks.

    Args:
        stage: from 0, the first.
        stages: how many there are.
        micro_batches: of the step, 1 or more; fewer than there are stages leave some of them idle.
    """
    ahead = min(stages - 1 - stage, micro_batches)
    for m in range(ahead):
        yield "forward", m
    for m in range(micro_batches):
        if m + ahead < micro_batches:
            yield "forward", m + ahead
        yield "backward", m
