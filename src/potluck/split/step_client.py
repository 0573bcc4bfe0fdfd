"""A client that stays connected: its part of every step of training, computed when it is its turn."""

import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.loss import Head, Targets, cross_entropy
from potluck.chain.piece import At
from potluck.errors import PotluckError
from potluck.split.client_data import ClientData
from potluck.split.client_model import ClientModel
from potluck.split.encoding import encode_rows
from potluck.split.forward import activations, record_of
from potluck.split.learner import Recipe, take_step
from potluck.split.listener import SplitListener
from potluck.split.messages import gradient_dtype, records_message
from potluck.split.parts import ClientPart
from potluck.split.quality import compared
from potluck.split.records import Record, TargetTable, draw_negatives
from potluck.split.step_talk import Talk, answered, signs_of_life
from potluck.split.terms import Terms
from potluck.split.uplink import Uplink
from potluck.texts.batch import Example

_JUDGED_TOKENS = 4096


def take_steps(
    uplink: Uplink,
    terms: Terms,
    model: ClientModel,
    examples: ClientData,
    listener: SplitListener,
) -> None:
    """Train until the server's last step.

    Args:
        uplink: to the server.
        terms: the server's; of a step scheme.
        model: this client's side of it.
        examples: of this client.
        listener: told how it goes.

    Raises:
        BadInput: the server refuses.
        DeviceLost: the server does not answer any more.
        PotluckError: the server's answers make no sense.
    """
    trainable = terms.split.client == "trainable"
    with model.part(terms, listener, trainable=trainable) as part, signs_of_life(uplink):
        head = None
        if terms.split.scheme == "u-shaped":
            head = Head(part.head(model.compute), model.decoder.logit_softcap)
        stay = _Stay(Talk(uplink), terms, part, head, examples, trainable, listener)
        counts = stay.begin()
        stay.judge()
        for step, indices in enumerate(_turns(len(examples.train), counts, examples.seed)):
            if indices:
                stay.step(step, [examples.train[i] for i in indices])
            if trainable and ((step + 1) % terms.split.average_every == 0 or step + 1 == len(counts)):
                stay.average()
            listener.progress("Training, steps", step + 1, len(counts))
        stay.judge()
        stay.leave()


@dataclass
class _Stay:
    talk: Talk
    terms: Terms
    part: ClientPart
    head: Head | None
    examples: ClientData
    trainable: bool
    listener: SplitListener

    def __post_init__(self) -> None:
        self._table = TargetTable() if self.terms.split.targets == "embeddings" else None
        self._trained = [t.local for t in self.part.part.trained]
        self._recipe = Recipe.of(self.terms, steps=1)
        self._optimizer = self._recipe.optimizer_of(self._trained)

    def begin(self) -> list[int]:
        """Tell what this client brings, and its tables; how many of its examples each step takes."""
        tensors: dict[str, Tensor] = {}
        split = self.terms.split
        if self._table is not None and self.head is None:
            for example in (*self.examples.train, *self.examples.held_out):
                self._table.indices(_targets(example))
            drawn = draw_negatives(self.terms.vocab_size, self.terms.negatives, self.examples.seed)
            for name, ids in (("table", self._table.ids), ("negatives", drawn)):
                if ids:
                    rows = encode_rows(self.part.target_rows(ids).float(), split.encoding)
                    tensors |= {f"{name}/{key}": value for key, value in rows.items()}
        words = {
            "do": "begin",
            "process": secrets.token_hex(8),  # two of one name and the same data must not be taken for one
            "examples": len(self.examples.train),
            "held_out": len(self.examples.held_out),
            "targets": sum(len(_targets(example)) for example in self.examples.train),
        }
        self.listener.tell("Waiting for the other clients.")
        told, _ = self.talk.say(words, tensors, "control")
        counts, steps = told.get("counts"), told.get("steps")
        if not isinstance(counts, list) or not isinstance(steps, int) or len(counts) != steps:
            raise PotluckError("The server's answer makes no sense: it did not say which steps there are.")
        self._recipe = replace(self._recipe, steps=steps)
        return [int(count) for count in counts]

    def step(self, step: int, examples: Sequence[Example]) -> None:
        """One step: activations up; in the u-shape outputs down and their gradient up; the gradient at the cut down."""
        at = At(self.terms.seed, step, 0, 0)
        with torch.set_grad_enabled(self.trainable):
            x_TD = activations(self.part, examples, at)
        records = self._records(examples, x_TD.detach())
        last = "cut gradient" if self.trainable else "control"
        received = "output" if self.head is not None else last
        told, tensors = self.talk.say({"do": "step"}, self._step_tensors(records), received)
        if self.head is not None:
            output_ND = answered(tensors, "output_ND", (sum(len(r.targets) for r in records), x_TD.shape[1]))
            loss, gradient_ND = self._compared(self.head, output_ND, examples, _weight(told))
            answer = {"gradient_ND": gradient_ND.to(gradient_dtype(self.terms.split.encoding))}
            _, tensors = self.talk.say({"do": "gradient", "loss": loss}, answer, last)
        if x_TD.requires_grad:
            gradient_TD = answered(tensors, "gradient_TD", tuple(x_TD.shape))
            torch.autograd.backward(x_TD, gradient_TD.to(x_TD.dtype))
            take_step(self._optimizer, self._trained, self._recipe, step)

    def average(self) -> None:
        """Give this client's adapters, take the average of all."""
        mine = {t.name: t.local.detach().float() for t in self.part.part.trained}
        _, averaged = self.talk.say({"do": "average"}, mine, "adapter")
        with torch.no_grad():
            for t in self.part.part.trained:
                t.local.copy_(answered(averaged, t.name, tuple(t.local.shape)))

    @torch.no_grad()
    def judge(self) -> None:
        """Have the held-out examples judged; in the u-shape this client does it, and tells what came out."""
        held = self.examples.held_out
        table_VD = None if self.head is None or not held else self.head.W_VD.float()
        verdicts: list[list[float | bool | int]] = []
        for some in _judged_together(held):
            x_TD = activations(self.part, some, At(self.terms.seed, 0, 0, 0, judging=True))
            tensors = self._step_tensors(self._records(some, x_TD))
            _, answer = self.talk.say({"do": "judge"}, tensors, "judging", judging=True)
            if self.head is not None and table_VD is not None:
                targets = [_targets(example) for example in some]
                counts = [len(of_one) for of_one in targets]
                rows_ND = table_VD[[token for of_one in targets for token in of_one]]
                output_ND = answered(answer, "output_ND", tuple(rows_ND.shape))
                loss_N, right_N = compared(output_ND, rows_ND, table_VD, self.head.softcap)
                for loss, right in zip(loss_N.split(counts), right_N.split(counts), strict=True):
                    verdicts.append([float(loss.sum()), bool(right.all()), len(loss)])
        if verdicts:
            self.talk.say({"do": "verdict", "examples": verdicts}, {}, "judging", judging=True)

    def leave(self) -> None:
        """Let the server know that all its answers are here."""
        with suppress(PotluckError):  # all is done, and the server may have ended
            self.talk.say({"do": "leave"}, {}, "control")

    def _records(self, examples: Sequence[Example], x_TD: Tensor) -> list[Record]:
        streams = x_TD.float().split([len(example.ids) - 1 for example in examples])
        return [record_of(example, x) for example, x in zip(examples, streams, strict=True)]

    def _step_tensors(self, records: Sequence[Record]) -> dict[str, Tensor]:
        targets = [token for record in records for token in record.targets]
        ids_or_indices = targets if self._table is None else self._table.indices(targets)
        labels = None if self.head is not None else ids_or_indices
        return records_message(records, self.terms.split.encoding, labels)

    def _compared(
        self, head: Head, output_ND: Tensor, examples: Sequence[Example], weight: float
    ) -> tuple[float, Tensor]:
        """Loss and its gradient, both divided by the targets of the whole step."""
        h_1ND = output_ND.to(head.W_VD.dtype)[None]
        ids_N = torch.tensor([token for example in examples for token in _targets(example)])
        loss, (gradient_1ND,) = cross_entropy(head, [h_1ND], Targets([ids_N], lambda ids: head.W_VD[ids]), 1, Comm())
        return float(loss) / weight, gradient_1ND[0].float() / weight


def _weight(told: Mapping[str, Any]) -> float:
    weight = told.get("weight")
    if not isinstance(weight, float) or not weight > 0:
        raise PotluckError("The server's answer makes no sense: it did not say how many targets the step has.")
    return weight


def _judged_together(examples: Sequence[Example]) -> Iterator[list[Example]]:
    some: list[Example] = []
    for example in examples:
        if some and sum(len(each.ids) for each in (*some, example)) > _JUDGED_TOKENS:
            yield some
            some = []
        some.append(example)
    if some:
        yield some


def _targets(example: Example) -> list[int]:
    return [token for token, wanted in zip(example.ids, example.supervised, strict=True) if wanted]


def _turns(examples: int, counts: Sequence[int], seed: int) -> Iterator[list[int]]:
    """The examples of each step: every epoch in an order of its own."""
    order: list[int] = []
    epoch = 0
    for count in counts:
        while len(order) < count:
            following = list(range(examples))
            random.Random(f"{seed} {epoch}").shuffle(following)
            order, epoch = order + following, epoch + 1
        yield order[:count]
        order = order[count:]
