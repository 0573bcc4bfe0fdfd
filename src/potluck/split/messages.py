"""What a client that stays connected and the server tell each other: tensors with a few words, as safetensors."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from potluck.errors import BadInput
from potluck.split.check import Limits
from potluck.split.dataset import StoredExample
from potluck.split.encoding import LARGEST, Encoding, Layout, decode, encode, layout
from potluck.split.records import Record

FIRST = 1
"""Number of a client's first message."""
_WORDS = "potluck"
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)  # those of 8 bits cannot be compared


def pack(words: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """A message; ``words`` are JSON."""
    content = {name: tensor.contiguous() for name, tensor in (tensors or {}).items()}
    return save(content, metadata={_WORDS: json.dumps(dict(words))})


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Words and tensors of a message.

    Raises:
        BadInput: it is none.
    """
    try:
        size = int.from_bytes(message[:8], "little")
        words = json.loads(json.loads(message[8 : 8 + size])["__metadata__"][_WORDS])
        return dict(words), load(message)
    except (SafetensorError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        raise BadInput("The message is damaged: it is no safetensors file with words.") from None


def gradient_dtype(encoding: Encoding) -> torch.dtype:
    """What gradients and outputs travel in: they have no record that is stored, and too large a range for integers."""
    return torch.float32 if encoding == "fp32" else torch.bfloat16


def records_message(records: Sequence[Record], encoding: Encoding, targets: Sequence[int] | None) -> dict[str, Tensor]:
    """The examples of one step; the same tensors as in a shard, no prefix shared.

    Args:
        records: in the order of the step.
        encoding: of the activations.
        targets: index or id of every target; None where labels stay with the client.
    """
    supervised = [bit for record in records for bit in _bits(record)]
    tensors = {
        "lengths_B": torch.tensor([len(record.prefix) for record in records], dtype=torch.int32),
        "supervised": torch.from_numpy(np.packbits(np.array(supervised, dtype=np.bool_))),
        **encode(torch.cat([record.x_TD for record in records]).float(), encoding),
    }
    if targets is not None:
        tensors["targets_N"] = torch.tensor(list(targets), dtype=torch.int32)
    return tensors


def examples_of(
    tensors: Mapping[str, Tensor], limits: Limits, *, most_targets: int | None, contribution: int
) -> list[StoredExample]:
    """The examples of one step, as a dataset gives those of the store.

    Args:
        tensors: from :func:`records_message`.
        limits: what the server accepts.
        most_targets: targets are below this number; None where labels stay with the client.
        contribution: the client's place among the clients.

    Raises:
        BadInput: a tensor is missing or of another kind, a value is not finite, or they do not fit together.
    """
    lengths_B = tensors.get("lengths_B")
    if lengths_B is None or "supervised" not in tensors or lengths_B.dtype != torch.int32 or lengths_B.ndim != 1:
        raise BadInput("The step lacks lengths or supervised positions.")
    lengths = lengths_B.tolist()
    if not lengths or min(lengths) < 1 or max(lengths) > limits.max_positions:
        raise BadInput(
            f"The step has examples of {min(lengths, default=0)} to {max(lengths, default=0)} positions;"
            f" 1 to {limits.max_positions} are taken."
        )
    T = sum(lengths)
    expected = layout(limits.agreement.encoding, T, limits.hidden_size)
    encoded = laid_out(tensors, expected, "step")
    if "outliers_C" in expected and not bool(
        (tensors["outliers_C"] < limits.hidden_size).all() & (tensors["outliers_C"] >= 0).all()
    ):
        raise BadInput("The step's outlier channels lie outside the model.")
    packed = tensors["supervised"]
    if packed.dtype != torch.uint8 or packed.shape != (-(-T // 8),):
        raise BadInput("The step's supervised bits do not fit its lengths.")
    supervised_T = np.unpackbits(packed.numpy(), count=T).astype(np.bool_)
    targets_N = tensors.get("targets_N")
    count = int(supervised_T.sum())
    if most_targets is None:
        targets_N = torch.zeros(count, dtype=torch.int32)
    elif targets_N is None or targets_N.dtype != torch.int32 or targets_N.shape != (count,):
        raise BadInput(f"The step has {count} supervised positions, but not as many targets.")
    elif count and not 0 <= int(targets_N.min()) <= int(targets_N.max()) < most_targets:
        raise BadInput(f"A target of the step lies outside 0 to {most_targets - 1}.")
    bits_B = np.split(supervised_T, np.cumsum(lengths)[:-1])
    counts = [int(bits.sum()) for bits in bits_B]
    if min(counts) == 0:
        raise BadInput(f"Example {counts.index(0)} of the step has no supervised position.")
    x_TD = decode(encoded, limits.hidden_size)
    return [
        StoredExample(x, torch.from_numpy(np.flatnonzero(bits)), targets, contribution)
        for x, bits, targets in zip(
            x_TD.split(lengths),
            bits_B,
            targets_N.long().split(counts),
            strict=True,
        )
    ]


def laid_out(tensors: Mapping[str, Tensor], expected: Layout, what: str) -> dict[str, Tensor]:
    """The tensors of a layout, checked value by value.

    Raises:
        BadInput: one is missing, of another dtype or shape, or holds a number that no model has.
    """
    for name, (dtype, shape) in expected.items():
        found = tensors.get(name)
        if found is None or found.dtype != dtype or found.shape != torch.Size(shape):
            raise BadInput(f"The {what}'s {name} is not {dtype} of shape {shape}.")
        if dtype.is_floating_point and not bool((found.abs() <= LARGEST).all()):
            raise BadInput(f"The {what}'s {name} holds NaN, infinity or a value beyond {LARGEST:g}.")
    return {name: tensors[name] for name in expected}


def floats(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor of numbers that a model may have, of a shape, in float32.

    Raises:
        BadInput: it is missing or another one.
    """
    found = tensors.get(name)
    if found is None or found.dtype not in _FLOATS or found.shape != torch.Size(shape):
        raise BadInput(f"The message's {name} is not numbers of shape {shape}.")
    if not bool((found.abs() <= LARGEST).all()):
        raise BadInput(f"The message's {name} holds NaN, infinity or a value beyond {LARGEST:g}.")
    return found.float()


def _bits(record: Record) -> list[bool]:
    supervised = set(record.positions)
    return [position in supervised for position in range(len(record.prefix))]
