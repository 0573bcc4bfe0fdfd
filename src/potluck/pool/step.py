"""One optimizer step of a pool: layouts, walks, gradients, update, clocks."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.errors import PotluckError
from potluck.job_sections import OptimizerName
from potluck.models.build import Part
from potluck.models.optimizer import optimizer_of, scheduled
from potluck.pool.gradients import squared_norm, steps_here, sum_partial
from potluck.pool.micro_batch import exchange
from potluck.pool.strategies.strategy import Strategy
from potluck.pool.strategies.tensor import TensorParallel
from potluck.pool.turns import Turn

OWNER = 0
"""The coordinator's rank, which always has data."""


@dataclass(frozen=True)
class Settings:
    """How steps are taken; every device has the same."""

    steps: int
    learning_rate: float
    schedule: str = "linear"
    warmup: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    half_batches: int = 2
    checkpointing: bool = False
    seed: int = 0
    optimizer: OptimizerName = "adamw"


@dataclass(frozen=True)
class DeviceTime:
    """Where one device's time went in one step, seconds."""

    compute_s: float
    wait_s: float
    """Blocked because another device computed longer."""
    transfer_s: float
    """Blocked although every device had come: the message itself."""


@dataclass(frozen=True)
class StepReport:
    """What one step did; loss and times are known to every device."""

    loss: float
    tokens: int
    target_tokens: int
    step_s: float
    learning_rate: float
    gradient_norm: float
    bytes_sent: int
    devices: tuple[DeviceTime, ...]
    owned_targets: tuple[int, ...]
    """Target tokens each device brought: the weight its data had in this step."""


@dataclass(frozen=True)
class Gradients:
    """What :meth:`Stepper.accumulate` found, beside the gradients: loss and norm of the whole step."""

    loss: float
    norm: float
    tokens: int
    target_tokens: int
    owned_targets: tuple[int, ...]


class Stepper:
    """Takes a device through its optimizer steps; all devices call :meth:`step` together."""

    def __init__(self, part: Part, comm: Comm, settings: Settings, strategy: Strategy | None = None) -> None:
        """Prepare the steps of one device.

        Args:
            part: what it holds.
            comm: the messages.
            settings: how steps are taken.
            strategy: its way through a step; ``tensor`` if left out.
        """
        self.comm, self.settings = comm, settings
        self.strategy = strategy or tensor_parallel(part, comm, settings)
        self.held = self.strategy.held
        mine = steps_here(self.held, comm.rank)
        self.optimizer = optimizer_of(mine, settings.optimizer, settings.weight_decay)
        self.done = 0

    def step(self, turns: Sequence[Turn]) -> StepReport:
        """Train on one step's turns, the same on every device but for their contents.

        Raises:
            DeviceLost: another device ended.
            PotluckError: the loss or a gradient is not finite; no weight was changed by this step.
        """
        start = time.perf_counter()
        self.comm.clocks.restart()
        sent_before = self.comm.clocks.bytes_sent
        found = self.accumulate(turns)
        rate = self.settings.learning_rate * scheduled(self.settings, self.done)
        self.update(found.norm, rate)
        step_s, devices = self._times(start)
        return StepReport(
            loss=found.loss,
            tokens=found.tokens,
            target_tokens=found.target_tokens,
            step_s=step_s,
            learning_rate=rate,
            gradient_norm=found.norm,
            bytes_sent=self.comm.clocks.bytes_sent - sent_before,
            devices=devices,
            owned_targets=found.owned_targets,
        )

    def accumulate(self, turns: Sequence[Turn]) -> Gradients:
        """Leave the whole step's gradient, as far as this device holds it, in ``.grad`` of its trained tensors."""
        micro_batches = exchange(turns, self.comm)
        target_tokens = sum(each.targets for each in micro_batches)
        part_of_loss = self.strategy.walk(micro_batches, self.done, target_tokens)
        sum_partial(self.held, self.comm)
        norm, loss = self._agree(part_of_loss)
        owned_targets = [0] * self.comm.world_size
        for each in micro_batches:
            owned_targets[each.owner] += each.targets
        tokens = sum(sum(each.layout.lengths) for each in micro_batches)
        return Gradients(loss, norm, tokens, target_tokens, tuple(owned_targets))

    def update(self, norm: float, rate: float) -> None:
        """Clip, step what is stepped here, and give replicated tensors their new values everywhere."""
        factor = self.settings.clip / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_ has it
        if self.optimizer is not None:
            if 0 < factor < 1:
                torch._foreach_mul_(self.optimizer.gradients(), factor)
            self.optimizer.step(rate)
        for held in self.held:
            held.trained.local.grad = None
        self.strategy.spread()
        self.done += 1

    def _agree(self, loss: Tensor) -> tuple[float, float]:
        """The gradient norm and the loss of the whole step, in one message; all devices stop together."""
        numbers = torch.stack((squared_norm(self.held, self.comm.rank), loss))
        squares, whole_loss = self.comm.all_reduce(numbers, exact=True).wait().tolist()
        if not math.isfinite(squares) or not math.isfinite(whole_loss):
            what = "loss" if not math.isfinite(whole_loss) else "gradient norm"
            raise PotluckError(
                f"The {what} of step {self.done + 1} is not a finite number; the weights were left as they were before"
                " it. Try a lower learning_rate, or dtype: fp32."
            )
        return math.sqrt(squares), whole_loss

    def _times(self, start: float) -> tuple[float, tuple[DeviceTime, ...]]:
        """Split every device's step into compute, wait and transfer (see :func:`split_times`)."""
        clocks = self.comm.clocks
        own = torch.tensor([time.perf_counter() - start, clocks.awaited_s, *clocks.blocked_s], dtype=torch.float64)
        everyone_WN = self.comm.all_gather(own).wait()
        step_W, awaited_W, blocked_WN = everyone_WN[:, 0], everyone_WN[:, 1], everyone_WN[:, 2:]
        return float(step_W.max()), split_times(step_W, awaited_W, blocked_WN)


def tensor_parallel(part: Part, comm: Comm, settings: Settings) -> TensorParallel:
    """The walk of ``tensor`` with these settings."""
    return TensorParallel(
        part,
        comm,
        half_batches=settings.half_batches,
        checkpointing=settings.checkpointing,
        seed=settings.seed,
    )


def split_times(step_W: Tensor, awaited_W: Tensor, blocked_WN: Tensor) -> tuple[DeviceTime, ...]:
    """Each device's compute, wait and transfer.

    Of a message of all devices, who came last was blocked least, for as long as the message itself took; what the
    others were blocked beyond that, they waited for it. The source of a broadcast is hardly blocked at all, so the time
    of one (embeddings, values of replicated tensors) counts as waiting for its source.

    A message between two devices is sent without waiting, and asked for before it is needed. Who is blocked by one
    (a stage of a pipeline) waits for another device's work, or for the message where that takes longer than the work
    beside it: both count as waiting.

    Args:
        step_W: seconds of each device's step.
        awaited_W: seconds each was blocked by messages between two devices.
        blocked_WN: seconds each was blocked by each message of all devices.
    """
    transfer = blocked_WN.amin(0).sum() if blocked_WN.shape[1] else torch.zeros(())
    blocked_W = awaited_W + blocked_WN.sum(1)
    return tuple(
        DeviceTime(float(step - blocked), float(blocked - transfer), float(transfer))
        for step, blocked in zip(step_W, blocked_W, strict=True)
    )
