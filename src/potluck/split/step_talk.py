"""What a connected client says to the server: numbered, counted by what it is, and answered before it goes on."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from potluck.errors import BadInput, PotluckError
from potluck.split.messages import FIRST, floats, pack, unpack
from potluck.split.uplink import Uplink

_SIGN_OF_LIFE_S = 2.0


class Talk:
    """A client's messages, one after the other."""

    def __init__(self, uplink: Uplink) -> None:
        self._uplink = uplink
        self._number = FIRST

    def say(
        self, words: Mapping[str, Any], tensors: Mapping[str, Tensor], received: str, *, judging: bool = False
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Send a message and wait for its answer.

        Args:
            words: ``do`` says what it is.
            tensors: what it brings.
            received: what the answer is counted as.
            judging: count what it brings as that.

        Raises:
            BadInput: the server refuses, or has ended training.
            DeviceLost: the server does not answer.
            PotluckError: the answer is damaged.
        """
        body, kinds = pack(words, tensors), _kinds(str(words["do"]), tensors)
        if judging:
            kinds = {"judging": sum(kinds.values())}
        try:
            answer = self._uplink.step(self._number, body, kinds, received)
        except BadInput as error:
            raise BadInput(f"The server ended this client's part: {error}") from None
        self._number += 1
        try:
            return unpack(answer)
        except BadInput as error:
            raise PotluckError(f"The server's answer makes no sense: {error}") from None


def answered(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of the server's answer, float32.

    Raises:
        PotluckError: it is not what was asked for.
    """
    try:
        return floats(tensors, name, shape)
    except BadInput as error:
        raise PotluckError(f"The server's answer makes no sense: {error}") from None


@contextmanager
def signs_of_life(uplink: Uplink) -> Iterator[None]:
    """Tell the server now and then that this client is here, while it computes or waits."""
    ended = threading.Event()

    def tell() -> None:
        while not ended.wait(_SIGN_OF_LIFE_S):
            try:
                uplink.alive()
            except (PotluckError, RuntimeError):
                return  # the next step will say why; RuntimeError: the connection was closed at the end meanwhile

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=_SIGN_OF_LIFE_S)


def _kinds(do: str, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes of a message by what they are; the rest of it is framing."""
    kinds: dict[str, int] = {}
    for name, tensor in tensors.items():
        kind = {"gradient_ND": "output gradient", "targets_N": "targets", "supervised": "targets"}.get(name)
        if kind is None and "/" in name:
            kind = name.partition("/")[0]
        kind = kind or ("adapter" if do == "average" else "activations")
        kinds[kind] = kinds.get(kind, 0) + tensor.nbytes
    return kinds
