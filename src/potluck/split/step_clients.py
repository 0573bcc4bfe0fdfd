"""The clients of a training in steps: who is here, and what each of them says next."""

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.errors import BadInput
from potluck.split.assembly import Assembly
from potluck.split.dataset import StoredExample
from potluck.split.messages import examples_of, pack
from potluck.split.settings import Settled
from potluck.split.step_table import Connected, Message, StepTable
from potluck.split.weights import capped_weights


@dataclass(frozen=True)
class Clients:
    """All that began, in the order of their names; a client's place is its contribution's number."""

    settled: Settled
    table: StepTable
    everybody: tuple[Connected, ...]
    assembly: Assembly | None
    """None in the u-shape: the server knows no target."""

    @property
    def here(self) -> list[Connected]:
        """Those that have not left."""
        return [client for client in self.everybody if not client.gone]

    def weights(self) -> list[float] | None:
        """What one target token of each client counts; None if all count 1.

        Raises:
            BadInput: the job's cap leaves weight that no client may have.
        """
        weights = capped_weights([c.target_tokens for c in self.everybody], self.settled.split.weight_cap)
        return None if all(weight == 1.0 for weight in weights) else weights

    def messages(self, kind: str, asked: Sequence[Connected]) -> dict[str, Message]:
        """One message of a kind from each that is asked and still here, in the clients' order."""
        found = self.table.next(kind, asked, self.everybody)
        return {client.name: found[client.name] for client in self.everybody if client.name in found}

    def examples(self, kind: str, asked: Sequence[Connected]) -> dict[str, tuple[Message, list[StoredExample]]]:
        """Each client's examples of one message, in the clients' order; who sends what cannot be used has left."""
        found = {}
        for name, message in self.messages(kind, asked).items():
            try:
                found[name] = (message, self._unpacked(message))
            except BadInput as error:
                self.refuse(message, str(error))
        return found

    def place(self, name: str) -> int:
        """Of a client among all."""
        return next(i for i, client in enumerate(self.everybody) if client.name == name)

    def refuse(self, message: Message, why: str) -> None:
        """Answer with a reason; the client has left."""
        message.answer.set_exception(BadInput(why))
        self.everybody[self.place(message.client)].gone = True

    def dismiss(self) -> None:
        """Wait until all have said that they leave: each has then received all its answers."""
        for message in self.messages("leave", self.here).values():
            message.answer.set_result(pack({}))

    def _unpacked(self, message: Message) -> list[StoredExample]:
        place, most_targets = self.place(message.client), None
        if self.assembly is not None:
            joined = self.assembly.candidates
            most_targets = self.settled.decoder.vocab_size if joined is None else len(joined.places[place])
        return examples_of(message.tensors, self.settled.limits, most_targets=most_targets, contribution=place)
