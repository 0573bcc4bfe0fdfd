"""The optimizer steps over a dataset, one after another, resumable from any of them."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import Accelerator

from potluck.errors import PotluckError, SaveFailed
from potluck.split.assembly import Assembly
from potluck.split.checkpoint import read_meta, restore, save_checkpoint
from potluck.split.dataset import Dataset
from potluck.split.learner import Fed, Learner
from potluck.texts.order import Order, micro_batches


@dataclass
class Epochs:
    """Training on a dataset; every process of a run walks the same steps, each with its part of the batch."""

    learner: Learner
    assembly: Assembly
    data: Dataset
    batch_size: int
    micro_batch_size: int
    weights: Sequence[float] | None
    """What a target of each client counts; None if all count 1."""
    accelerator: Accelerator
    dtype: str = "fp32"
    """What the learner computes in: a run that goes on computes in the same."""
    losses: list[float] = field(default_factory=list)
    """Of each step so far."""

    def __post_init__(self) -> None:
        self._order = Order(self.data.lengths.tolist(), self.batch_size, self.learner.recipe.seed)

    def run(
        self, checkpoint: Path, key: str, every_s: float, on_step: Callable[[int, int, float, float], None]
    ) -> None:
        """Take all steps that are left.

        Args:
            checkpoint: where the run stands is kept here, replaced now and then.
            key: of what the run depends on; only a checkpoint with the same key is resumed.
            every_s: seconds between checkpoints.
            on_step: told step, steps, loss and seconds.

        Raises:
            SaveFailed: the checkpoint cannot be written.
            PotluckError: a gradient or the loss is not finite.
        """
        steps, saved_s = self.learner.recipe.steps, time.monotonic()
        while self.learner.done < steps:
            began = time.monotonic()
            loss = self._step()
            self.losses.append(loss)
            on_step(self.learner.done, steps, loss, time.monotonic() - began)
            if self.accelerator.is_main_process and time.monotonic() - saved_s >= every_s:
                self._save(checkpoint, key)
                saved_s = time.monotonic()

    def resume(self, checkpoint: Path, key: str) -> int:
        """Go to where a checkpoint of the same run stands; its steps, 0 if there is none."""
        meta = read_meta(checkpoint)
        if meta is None or meta.get("key") != key:
            return 0
        restore(checkpoint, self.learner.part.trained, self.learner.optimizer)
        self.losses = [float(loss) for loss in meta["losses"]]
        self.learner.done = len(self.losses)
        return self.learner.done

    def _step(self) -> float:
        indices = self._order.indices(self.learner.done)
        clients, counts = self.data.clients[indices], self.data.target_counts[indices]
        counted = counts if self.weights is None else counts * torch.tensor(self.weights).numpy()[clients]
        step_weight = float(counted.sum())
        rank, world_size = self.accelerator.process_index, self.accelerator.num_processes
        mine = indices[rank::world_size]
        parts = micro_batches(mine, self.micro_batch_size) if mine else [indices[:1]]
        loss = 0.0
        for m, part in enumerate(parts):
            fed = self._fed(part) if mine else _without_targets(self._fed(part))
            loss += self.learner.learn(fed, step_weight, m, more=m + 1 < len(parts))
        if world_size > 1:
            loss = float(self.accelerator.reduce(torch.tensor(loss, device=self.accelerator.device), "sum"))
        if not math.isfinite(loss):
            raise PotluckError(
                f"The loss of step {self.learner.done + 1} is not a finite number; the weights were left as they were "
                "before it. Try a lower learning_rate, or dtype: fp32."
            )
        self.learner.update()
        return loss

    def _fed(self, part: Sequence[int]) -> Fed:
        weights = None if self.weights is None else [self.weights[self.data.clients[i]] for i in part]
        return self.assembly.fed(self.data.read(part), weights)

    def _save(self, path: Path, key: str) -> None:
        try:
            save_checkpoint(
                path,
                self.learner.part.trained,
                self.learner.optimizer,
                {"key": key, "dtype": self.dtype, "losses": self.losses},
            )
        except Exception as error:  # OSError, or whatever the library makes of it
            raise SaveFailed(f"{path} cannot be written ({' '.join(str(error).split())}): make room there.") from None


def _without_targets(fed: Fed) -> Fed:
    """For a process whose part of a batch is empty: it must take part in summing up gradients."""
    return Fed(fed.x_BSD, fed.kept_N[:0], fed.targets_N[:0])
