"""Training with clients that stay connected, step after step: u-shaped, and l-shaped with frozen or trained clients.

Every client computes its part of a step's batch and sends the activations at the cut; the server puts them together,
takes one step, and, where clients are trained, gives each the gradient at the cut. In the u-shape it sends its last
hidden states at supervised positions first, and the client, which alone has the labels, answers with their gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.errors import BadInput, DeviceLost
from potluck.models.checkpoint import Checkpoint
from potluck.models.precision import torch_dtype
from potluck.split.assembly import assembly_of
from potluck.split.counts import step_counts
from potluck.split.dataset import StoredExample
from potluck.split.learner import Fed, Learner
from potluck.split.listener import SplitListener
from potluck.split.messages import floats, gradient_dtype, pack
from potluck.split.settings import Settled
from potluck.split.step_clients import Clients
from potluck.split.step_judging import unlabelled
from potluck.split.step_table import Connected, Message, StepTable
from potluck.split.trainer import learner_of

Said = dict[str, tuple[Message, list[StoredExample]]]
"""By client: its message of this step, and the examples in it."""


@dataclass
class StepTraining:
    """All that steps need; made when every client has begun."""

    settled: Settled
    learner: Learner
    clients: Clients
    weights: list[float] | None
    """What a target token of each client counts; None if all count 1."""
    averaged: dict[str, Tensor]
    """The clients' adapters, as last averaged; empty where clients are frozen."""
    losses: list[float]

    def run(self, listener: SplitListener, clock: Callable[[], float]) -> None:
        """Take all steps.

        Raises:
            DeviceLost: every client has left.
            PotluckError: the loss or a gradient is not finite.
        """
        split, steps = self.settled.split, self.learner.recipe.steps
        learned = dict.fromkeys((client.name for client in self.clients.everybody), 0)
        for step in range(steps):
            began = clock()
            before = {client.name for client in self.clients.here}
            self.losses.append(self._step(step, learned))
            if self._trainable and ((step + 1) % split.average_every == 0 or step + 1 == steps):
                self._average(learned)
            for name in sorted(before - {client.name for client in self.clients.here}):
                listener.tell(f"{name} has left in step {step + 1}; training goes on without it.")
            if not self.clients.here:
                raise DeviceLost(f"Every client has left by step {step + 1} of {steps}: nothing was saved.")
            listener.step(step + 1, steps, self.losses[-1], clock() - began)

    @property
    def _trainable(self) -> bool:
        return self.settled.split.client == "trainable"

    @property
    def _wire(self) -> torch.dtype:
        return gradient_dtype(self.settled.split.encoding)

    def _step(self, step: int, learned: dict[str, int]) -> float:
        said = self.clients.examples("step", [client for client in self.clients.here if client.counts[step]])
        if not said:
            self.learner.done += 1
            return self.losses[-1] if self.losses else 0.0
        fed = self._fed([example for _, of_client in said.values() for example in of_client])
        if self._trainable:
            fed.x_BSD.requires_grad_()
        for name, (_, of_client) in said.items():
            learned[name] += sum(len(example.positions_N) for example in of_client)
        waiting = {name: message for name, (message, _) in said.items()}
        if self.clients.assembly is None:
            loss = self._around(fed, said, waiting)
        else:
            loss = self.learner.learn(fed, fed.weight)
        self.learner.update()
        self._answer(waiting, said, fed.x_BSD.grad if self._trainable else None)
        return loss

    def _fed(self, examples: list[StoredExample]) -> Fed:
        weights = None if self.weights is None else [self.weights[example.contribution] for example in examples]
        assembly = self.clients.assembly
        return unlabelled(examples, weights) if assembly is None else assembly.fed(examples, weights)

    def _around(self, fed: Fed, said: Said, waiting: dict[str, Message]) -> float:
        """The u-shape's second half: outputs to the clients, their gradients back; the loss they found.

        A client that leaves meanwhile adds no gradient, and is taken out of ``waiting``.
        """
        h_ND = self.learner.hidden(fed)
        counts = [sum(len(example.positions_N) for example in examples) for _, examples in said.values()]
        gradient_ND = torch.zeros_like(h_ND)
        gradients = dict(zip(said, gradient_ND.split(counts), strict=True))
        for message, h in zip(waiting.values(), h_ND.detach().split(counts), strict=True):
            message.answer.set_result(pack({"weight": fed.weight}, {"output_ND": h.to(self._wire)}))
        waiting.clear()
        loss = 0.0
        for name, message in self.clients.messages(
            "gradient", [c for c in self.clients.here if c.name in said]
        ).items():
            weight = 1.0 if self.weights is None else self.weights[self.clients.place(name)]
            try:
                gradient = floats(message.tensors, "gradient_ND", tuple(gradients[name].shape))
                loss += _loss(message) * weight
            except BadInput as error:
                self.clients.refuse(message, str(error))
                continue
            gradients[name].copy_(gradient * weight)
            waiting[name] = message
        torch.autograd.backward(h_ND, gradient_ND)
        return loss

    def _answer(self, waiting: dict[str, Message], said: Said, gradient_BSD: Tensor | None) -> None:
        """To each client the gradient of its rows at the cut, without the padding; nothing where it is frozen."""
        row = 0
        for name, (_, examples) in said.items():
            tensors = {}
            if gradient_BSD is not None:
                parts = [gradient_BSD[row + i, : len(example.x_TD)] for i, example in enumerate(examples)]
                tensors = {"gradient_TD": torch.cat(parts).to(self._wire)}
            row += len(examples)
            if name in waiting:
                waiting[name].answer.set_result(pack({}, tensors))

    def _average(self, learned: dict[str, int]) -> None:
        """Clients' adapters, averaged by the target tokens each has learned from since the last time."""
        adapters: dict[str, dict[str, Tensor]] = {}
        messages = self.clients.messages("average", self.clients.here)
        for name, message in messages.items():
            try:
                shapes = {tensor: tuple(like.shape) for tensor, like in self.averaged.items()}
                adapters[name] = {tensor: floats(message.tensors, tensor, shape) for tensor, shape in shapes.items()}
            except BadInput as error:
                self.clients.refuse(message, str(error))
        if not adapters:
            return
        total = sum(learned[name] for name in adapters)
        weights = {name: learned[name] / total if total else 1 / len(adapters) for name in adapters}
        for tensor in self.averaged:
            parts = [weights[name] * adapter[tensor].double() for name, adapter in adapters.items()]
            self.averaged[tensor] = torch.stack(parts).sum(0).float()
        for name in adapters:
            messages[name].answer.set_result(pack({}, self.averaged))
        learned.update(dict.fromkeys(learned, 0))


def begin(
    settled: Settled,
    begun: Sequence[tuple[Connected, Message]],
    table: StepTable,
    checkpoint: Checkpoint,
    client_tensors: dict[str, Tensor],
) -> StepTraining:
    """Make the server part for the clients that have come, and tell each what it has to do.

    Raises:
        BadInput: the job's cap on one client's weight cannot be kept.
    """
    job, split = settled.job, settled.split
    everybody = tuple(client for client, _ in begun)
    total = sum(client.examples for client in everybody)
    steps = job.steps or max(1, math.ceil(job.epochs * math.ceil(total / job.batch_size)))
    for client, counts in zip(
        everybody, step_counts([c.examples for c in everybody], job.batch_size, steps), strict=True
    ):
        client.counts = counts
    assembly = None
    if split.scheme != "u-shaped":
        tables = (client.tables for client in everybody)
        assembly = assembly_of(tables, checkpoint, settled.decoder, split, torch_dtype(job.dtype))
    clients = Clients(settled, table, everybody, assembly)
    weights = clients.weights()
    learner = learner_of(settled, checkpoint, assembly, steps, None)
    for client, message in begun:
        message.answer.set_result(pack({"steps": steps, "counts": client.counts}))
    return StepTraining(settled, learner, clients, weights, dict(client_tensors), [])


def _loss(message: Message) -> float:
    loss = message.words.get("loss")
    if not isinstance(loss, float) or not math.isfinite(loss):
        raise BadInput("The client did not tell a loss.")
    return loss
