"""What a strategy has to know how to do; the step around it is the same for all (``pool/step.py``)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor

from potluck.models.build import Part
from potluck.pool.gradients import Held
from potluck.pool.micro_batch import MicroBatch


class Strategy(Protocol):
    """One device's way through a step; all devices of a plan call the same methods together."""

    part: Part
    """What this device holds."""
    held: list[Held]
    """Its trained tensors, and which of them are summed, stepped and spread with others."""

    def walk(self, micro_batches: Sequence[MicroBatch], step: int, step_targets: int) -> Tensor:
        """Walk forward and backward, adding to ``.grad`` of this device's trained tensors.

        Args:
            micro_batches: of the whole step, alike on all devices but for their contents.
            step: which step this is, from 0; masks of dropout follow from it.
            step_targets: supervised positions of the step on all devices, by which losses are divided.

        Returns:
            This device's part of the step's loss, a float64 scalar.
        """
        ...

    def spread(self) -> None:
        """Give what several devices have its new values, once those that step it have done so; all call it together.

        Raises:
            DeviceLost: another device ended.
        """
        ...

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Each trained tensor of the whole model, one after the other, on rank 0; nothing elsewhere.

        Every rank runs it to the end.
        """
        ...
