"""The server's side of one optimizer step: activations in, loss, gradients, update; alike in every scheme."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from potluck.chain.comm import Comm
from potluck.chain.loss import Head, Targets, cross_entropy
from potluck.chain.piece import At
from potluck.errors import PotluckError
from potluck.job_sections import OptimizerName
from potluck.models.optimizer import Optimizer, optimizer_of, scheduled
from potluck.split.parts import SplitPart

if TYPE_CHECKING:  # clients know how steps are taken, and have no use for the library
    from accelerate import Accelerator

    from potluck.job import Job
    from potluck.split.terms import Terms


@dataclass(frozen=True)
class Recipe:
    """How steps are taken, alike on the server and on trainable clients."""

    steps: int
    learning_rate: float
    schedule: str
    warmup: float
    weight_decay: float
    clip: float
    seed: int
    optimizer: OptimizerName = "adamw"

    @classmethod
    def of(cls, source: "Job | Terms", steps: int) -> Self:
        """As a job, or a server's terms, say it."""
        names = [field.name for field in fields(cls) if field.name != "steps"]
        return cls(steps, **{name: getattr(source, name) for name in names})

    def optimizer_of(self, tensors: Sequence[Tensor]) -> Optimizer | None:
        """The optimizer of these tensors; None where nothing is trained."""
        return optimizer_of(tensors, self.optimizer, self.weight_decay)


@dataclass(frozen=True)
class Fed:
    """Examples as the server is fed them, padded on the right."""

    x_BSD: Tensor
    """The residual stream at the cut, float32 or better."""
    kept_N: Tensor
    """Supervised ones of the ``B * S`` positions, int64, row by row."""
    targets_N: Tensor
    """For each, its target's row of the head, int64."""
    weights_N: Tensor | None = None
    """What each counts; 1 if left out."""

    @property
    def weight(self) -> float:
        """Of all positions together."""
        return float(len(self.kept_N)) if self.weights_N is None else float(self.weights_N.sum())


class Learner:
    """The server part with its head and optimizer; in several processes each has one, and they stay equal."""

    def __init__(
        self, part: SplitPart, head: Head | None, recipe: Recipe, accelerator: "Accelerator | None" = None
    ) -> None:
        """Prepare training.

        Args:
            part: the server part, on the accelerator's device.
            head: what hidden states are compared with; None where clients do that.
            recipe: how steps are taken.
            accelerator: several processes or an accelerator; None for this process alone.
        """
        self.part, self.head, self.recipe, self.done = part, head, recipe, 0
        self._accelerator = accelerator
        self._module: nn.Module = part.module if accelerator is None else accelerator.prepare(part.module)
        self._trained = [t.local for t in part.trained]
        self.optimizer = recipe.optimizer_of(self._trained)
        self.device = self._trained[0].device if self._trained else torch.device("cpu")

    @property
    def world_size(self) -> int:
        """Processes that train together."""
        return 1 if self._accelerator is None else self._accelerator.num_processes

    def learn(self, fed: Fed, step_weight: float, micro_batch: int = 0, *, more: bool = False) -> float:
        """Add the gradients of one micro-batch; its part of the step's loss.

        Args:
            fed: the micro-batch; may be without a supervised position, where another process has more.
            step_weight: weight of the step's target tokens, over all micro-batches and processes.
            micro_batch: its number, for dropout.
            more: whether another micro-batch follows, so that processes need not sum gradients yet.
        """
        with self._apart() if more else nullcontext():
            h_ND = self.hidden(fed, micro_batch)
            loss, gradient_ND = self.judged(h_ND.detach(), fed, step_weight)
            torch.autograd.backward(h_ND, gradient_ND * self.world_size)  # which is divided by it again in the mean
        return loss

    def hidden(self, fed: Fed, micro_batch: int = 0, *, judging: bool = False) -> Tensor:
        """Normed last hidden states ``[N, D]`` of the supervised positions, with their graph.

        Without dropout where ``judging``.
        """
        at = At(self.recipe.seed, self.done, micro_batch, 0, judging)
        h_ND: Tensor = self._module(fed.x_BSD.to(self.device), fed.kept_N.to(self.device), at)
        return h_ND

    def judged(self, h_ND: Tensor, fed: Fed, step_weight: float) -> tuple[float, Tensor]:
        """Loss of hidden states and its gradient ``[N, D]``, both divided by ``step_weight``."""
        head = self.head
        assert head is not None
        if len(fed.kept_N) == 0:
            return 0.0, torch.zeros_like(h_ND)
        targets = Targets([fed.targets_N.to(self.device)], lambda ids: head.W_VD[ids])
        weights = None if fed.weights_N is None else [fed.weights_N.to(h_ND)]
        loss, (gradient_1ND,) = cross_entropy(head, [h_ND[None]], targets, 1, Comm(), weights)
        return float(loss) / step_weight, gradient_1ND[0] / step_weight

    def update(self) -> float:
        """Clip, step, forget the gradients; the norm they had.

        Raises:
            PotluckError: a gradient is not finite; no weight was changed.
        """
        norm = take_step(self.optimizer, self._trained, self.recipe, self.done)
        self.done += 1
        return norm

    def _apart(self) -> AbstractContextManager[object]:
        return nullcontext() if self._accelerator is None else self._accelerator.no_sync(self._module)


def take_step(optimizer: Optimizer | None, trained: Sequence[Tensor], recipe: Recipe, step: int) -> float:
    """Clip the gradients, step at the rate of 0-based ``step``, forget them; the norm they had.

    Raises:
        PotluckError: a gradient is not finite; no weight was changed.
    """
    norm = float(torch.nn.utils.clip_grad_norm_(trained, recipe.clip or math.inf))
    if not math.isfinite(norm):
        raise PotluckError(
            f"The gradient of step {step + 1} is not a finite number; the weights were left as they were before it. Try"
            " a lower learning_rate, or dtype: fp32."
        )
    if optimizer is not None:
        optimizer.step(recipe.learning_rate * scheduled(recipe, step))
    for tensor in trained:
        tensor.grad = None
    return norm


def fed_of(
    streams: Sequence[Tensor], positions: Sequence[Tensor], targets: Sequence[Tensor], weights: Sequence[float] | None
) -> Fed:
    """One micro-batch of examples.

    Args:
        streams: ``[T, D]`` of each example.
        positions: supervised ones of each, int64.
        targets: rows of the head, as many.
        weights: what each target of an example counts.
    """
    S = max(len(x) for x in streams)
    x_BSD = streams[0].new_zeros(len(streams), S, streams[0].shape[1])
    for row, x_TD in enumerate(streams):
        x_BSD[row, : len(x_TD)] = x_TD
    kept_N = torch.cat([row * S + at for row, at in enumerate(positions)])
    weights_N = None
    if weights is not None:
        weights_N = torch.cat([torch.full((len(at),), w) for at, w in zip(positions, weights, strict=True)])
    return Fed(x_BSD, kept_N, torch.cat(list(targets)), weights_N)
