"""One optimizer step of a pool: layouts, walks, gradients, update, clocks."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.embedding import share_embedding
from potluck.chain.loss import Targets, cross_entropy
from potluck.chain.piece import At
from potluck.chain.walk import backward, forward
from potluck.errors import PotluckError
from potluck.models.build import Part
from potluck.models.optimizer import adamw, scheduled
from potluck.pool.gradients import Held, hold, spread_values, squared_norm, steps_here, sum_partial
from potluck.pool.halves import deal, decode_layouts, encode_layouts
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch, Layout

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


@dataclass(frozen=True)
class _MicroBatch:
    """One micro-batch as this device sees it: contents only where they are owned."""

    owner: int
    layout: Layout
    batch: Batch | None

    @property
    def targets(self) -> int:
        return sum(len(positions) for positions in self.layout.positions)


class Stepper:
    """Takes a device through its optimizer steps; all devices call :meth:`step` together."""

    def __init__(self, part: Part, comm: Comm, settings: Settings) -> None:
        self.part, self.comm, self.settings = part, comm, settings
        self.held: list[Held] = hold(part.chain.trained, comm.rank, comm.world_size)
        mine = steps_here(self.held, comm.rank)
        self.optimizer = adamw(mine, settings.learning_rate, settings.weight_decay)
        self.done = 0

    def step(self, turns: Sequence[Turn]) -> StepReport:
        """Train on one step's turns, the same on every device but for their contents.

        Raises:
            DeviceLost: another device ended.
            PotluckError: the loss or a gradient is not finite; no weight was changed by this step.
        """
        start = time.perf_counter()
        self.comm.clocks.blocked_s.clear()
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
        micro_batches = [each for turn in turns for each in self._exchanged(turn)]
        target_tokens = sum(each.targets for each in micro_batches)
        part_of_loss = self._walk(micro_batches, target_tokens)
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
            for group in self.optimizer.param_groups:
                group["lr"] = rate
                if 0 < factor < 1:
                    torch._foreach_mul_([t.grad for t in group["params"]], factor)
            self.optimizer.step()
        for held in self.held:
            held.trained.local.grad = None
        spread_values(self.held, self.comm)
        self.done += 1

    def _exchanged(self, turn: Turn) -> list[_MicroBatch]:
        """A turn's micro-batches, whose layouts their owner tells everyone."""
        batches, owner = turn.batches, turn.owner
        if self.comm.group is None:
            assert batches is not None
            return [_MicroBatch(owner, batch.layout, batch) for batch in batches]
        encoded = torch.empty(0) if batches is None else encode_layouts([batch.layout for batch in batches])
        size = self.comm.broadcast(torch.tensor([encoded.numel()]), owner).wait()
        content = torch.empty(int(size), dtype=torch.long) if batches is None else encoded
        layouts = decode_layouts(self.comm.broadcast(content, owner).wait())
        return [_MicroBatch(owner, layout, None if batches is None else batches[m]) for m, layout in enumerate(layouts)]

    def _walk(self, micro_batches: Sequence[_MicroBatch], step_targets: int) -> Tensor:
        """Add the step's gradients; returns this device's part of the loss."""
        part, comm = self.part, self.comm
        total = torch.zeros((), dtype=torch.float64)
        for m, each in enumerate(micro_batches):
            halves = deal(each.layout, each.batch, self.settings.half_batches)
            ats = [At(self.settings.seed, self.done, m, j) for j in range(len(halves))]
            D = part.hidden_size
            embedding = None if each.batch is None else part.embedding
            streams = [
                share_embedding(embedding, half.ids_BS, (*half.shape_BS, D), part.stream, comm, each.owner)
                for half in halves
            ]
            supervised = [half.positions_N for half in halves]
            checkpointing = self.settings.checkpointing
            hidden, tapes = forward(part.chain, streams, supervised, ats, comm, checkpointing=checkpointing)
            labels = [half.targets_N for half in halves if half.targets_N is not None]
            targets = None if each.batch is None else Targets(labels, part.target_rows)
            loss, gradients = cross_entropy(part.head, hidden, targets, step_targets, comm)
            backward(part.chain, tapes, gradients, comm)
            total += loss.double()
        return total

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
        own = torch.tensor([time.perf_counter() - start, *clocks.blocked_s], dtype=torch.float64)
        everyone_WN = self.comm.all_gather(own).wait()
        return float(everyone_WN[:, 0].max()), split_times(everyone_WN)


def split_times(everyone_WN: Tensor) -> tuple[DeviceTime, ...]:
    """Each device's compute, wait and transfer from ``[world_size, 1 + waits]``: step seconds, blocked seconds a wait.

    The device that came last to a message was blocked least, for as long as the message itself took; what the others
    were blocked beyond that, they waited for it. The source of a broadcast is hardly blocked at all, so the time of
    one (embeddings, values of replicated tensors) counts as waiting for its source.
    """
    step_W, blocked_WN = everyone_WN[:, 0], everyone_WN[:, 1:]
    transfer = blocked_WN.amin(0).sum() if blocked_WN.shape[1] else torch.zeros(())
    return tuple(
        DeviceTime(float(step - blocked.sum()), float(blocked.sum() - transfer), float(transfer))
        for step, blocked in zip(step_W, blocked_WN, strict=True)
    )
