"""Held-out examples of clients that stay connected: judged on the server, or in the u-shape by the client itself."""

import math

import torch
from torch import Tensor

from potluck.errors import BadInput
from potluck.split.dataset import StoredExample
from potluck.split.learner import Fed, Learner, fed_of
from potluck.split.messages import gradient_dtype, pack
from potluck.split.quality import Held, Judged, judge
from potluck.split.step_clients import Clients
from potluck.split.step_table import Message


def judged(clients: Clients, learner: Learner, table_VD: Tensor | None) -> list[Judged]:
    """Every client's held-out examples.

    Args:
        clients: that sent how many they have, and now send them, some at a time.
        learner: with the server part to be judged.
        table_VD: the whole table in the encoding of the targets; None in the u-shape, where clients compare.
    """
    found: list[Judged] = []
    left = {client.name: client.held_out for client in clients.here}
    while asked := [client for client in clients.here if left[client.name] > 0]:
        for name, (message, examples) in clients.examples("judge", asked).items():
            left[name] -= len(examples)
            if clients.assembly is None or table_VD is None:
                with torch.no_grad():
                    h_ND = learner.hidden(unlabelled(examples), judging=True)
                wire = gradient_dtype(clients.settled.split.encoding)
                message.answer.set_result(pack({}, {"output_ND": h_ND.to(wire)}))
                continue
            fed = clients.assembly.fed(examples)
            counts = tuple(len(example.positions_N) for example in examples)
            of_clients = tuple(example.contribution for example in examples)
            held = Held(fed, clients.assembly.target_rows(fed, table_VD), counts, of_clients)
            found += judge(learner, [held], table_VD, clients.assembly.head.softcap)
            message.answer.set_result(pack({}))
    if clients.assembly is None:
        for name, message in clients.messages("verdict", [c for c in clients.here if c.held_out]).items():
            client = clients.place(name)
            try:
                found += _verdicts(message, client, clients.everybody[client].held_out)
            except BadInput as error:
                clients.refuse(message, str(error))
            else:
                message.answer.set_result(pack({}))
    return found


def unlabelled(examples: list[StoredExample], weights: list[float] | None = None) -> Fed:
    """Examples whose targets nobody here knows; ``weights``: what a target of each counts."""
    positions = [example.positions_N for example in examples]
    return fed_of([e.x_TD for e in examples], positions, [torch.zeros_like(p) for p in positions], weights)


def _verdicts(message: Message, client: int, held_out: int) -> list[Judged]:
    """What a client found of its own held-out examples.

    Raises:
        BadInput: it makes no sense.
    """
    told = message.words.get("examples")
    if not isinstance(told, list) or len(told) != held_out or not all(_is_verdict(each) for each in told):
        raise BadInput(f"The client did not tell loss, rightness and targets of its {held_out} held-out examples.")
    return [Judged(client, float(loss), right, targets) for loss, right, targets in told]


def _is_verdict(told: object) -> bool:
    match told:
        case [float() as loss, bool(), int() as targets]:
            return math.isfinite(loss) and type(targets) is int and 0 < targets < 1 << 32
    return False
