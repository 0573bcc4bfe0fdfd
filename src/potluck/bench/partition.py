"""Which example goes to which client: evenly, unevenly by label, or whole labels."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from potluck.errors import BadInput

KINDS = "iid, dirichlet:ALPHA (such as dirichlet:0.8), topic"


def partition(labels: Sequence[str], clients: int, kind: str, seed: int) -> list[list[int]]:
    """Divide examples between clients; each example goes to one, and no client gets none.

    - ``iid``: shuffled, and dealt out evenly.
    - ``dirichlet:ALPHA``: each label's examples in proportions drawn from a symmetric Dirichlet distribution (Hsu et
      al., 2019); the smaller ALPHA, the fewer labels a client has. A client left without any is given one example of
      the client with the most.
    - ``topic``: no label is on two clients; the largest labels are dealt first, each to the client with the fewest
      examples so far.

    Args:
        labels: of each example.
        clients: how many.
        kind: one of the above.
        seed: the same seed gives the same division.

    Returns:
        For each client the indices of its examples, ascending.

    Raises:
        BadInput: the kind is not known, or there are fewer examples (for ``topic``: labels) than clients.
    """
    name, _, parameter = kind.partition(":")
    if clients < 1:
        raise BadInput(f"Examples cannot be divided between {clients} clients; there must be at least 1.")
    if len(labels) < clients:
        raise BadInput(f"{len(labels)} examples are too few for {clients} clients: each needs at least one.")
    rng = np.random.default_rng(seed)
    match name, parameter:
        case "iid", "":
            parts = _evenly(len(labels), clients, rng)
        case "dirichlet", alpha:
            parts = _by_proportions(labels, clients, _alpha(alpha, kind), rng)
        case "topic", "":
            parts = _whole_labels(labels, clients, rng)
        case _:
            raise BadInput(f"There is no division '{kind}' of examples between clients; there are {KINDS}.")
    return [sorted(part) for part in parts]


def _evenly(count: int, clients: int, rng: np.random.Generator) -> list[list[int]]:
    return [part.tolist() for part in np.array_split(rng.permutation(count), clients)]


def _by_proportions(labels: Sequence[str], clients: int, alpha: float, rng: np.random.Generator) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(clients)]
    for members in _shuffled_labels(labels, rng):
        shares = rng.dirichlet(np.full(clients, alpha))
        borders = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for part, given in zip(parts, np.split(members, borders), strict=True):
            part += given.tolist()
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return parts


def _whole_labels(labels: Sequence[str], clients: int, rng: np.random.Generator) -> list[list[int]]:
    groups = _shuffled_labels(labels, rng)
    if len(groups) < clients:
        raise BadInput(f"{len(groups)} labels are too few for {clients} clients: with 'topic' each needs its own.")
    parts: list[list[int]] = [[] for _ in range(clients)]
    drawn = [groups[index] for index in rng.permutation(len(groups))]  # labels of one size have no order of their own
    for members in sorted(drawn, key=len, reverse=True):
        min(parts, key=len).extend(members.tolist())
    return parts


def _shuffled_labels(labels: Sequence[str], rng: np.random.Generator) -> list[NDArray[np.int64]]:
    """The examples of each label, shuffled; labels in the order of their names."""
    of_label: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        of_label.setdefault(label, []).append(index)
    return [rng.permutation(of_label[label]) for label in sorted(of_label)]


def _alpha(text: str, kind: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = math.nan
    if not 0 < alpha < math.inf:
        raise BadInput(f"'{kind}' needs a number above 0 after the colon, such as dirichlet:0.8.")
    return alpha
