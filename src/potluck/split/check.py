"""What a shard from a stranger must be before the server takes it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from potluck.errors import BadInput
from potluck.split.agreement import RECORD_PARTS, Agreement, Part
from potluck.split.encoding import LARGEST, Layout, int4_hidden_size, layout, rows_layout
from potluck.split.shard_file import SHARD_BYTES, ShardFile

_CHECKED_AT_ONCE = 4 << 20


@dataclass(frozen=True)
class Limits:
    """What the server accepts."""

    agreement: Agreement
    hidden_size: int
    vocab_size: int
    max_positions: int
    """Positions an example may have."""


@dataclass(frozen=True)
class ShardInfo:
    """What a checked shard holds; the fields of its line in the manifest, and the largest index."""

    bytes: int
    part: Part
    examples: int
    tokens: int
    targets: int
    rows: int
    max_index: int
    """Largest index into the table among its targets; -1 in tables and where targets are ids."""


def check_shard(path: Path, limits: Limits) -> ShardInfo:
    """See that a shard holds what it should, value by value; memory does not grow with its size.

    Raises:
        BadInput: it is no safetensors file, cut short or damaged; a tensor is missing, unknown, or has another dtype
            or shape; a value is NaN, infinite or beyond reason; lengths, rows, supervised bits or targets do not fit
            together or lie out of range; it is empty. Says which.
    """
    with ShardFile(path) as shard:
        info = shard_info(shard, limits)
        for name, stored in shard.tensors.items():
            if stored.dtype.is_floating_point:
                _check_values(shard, name)
        return info


def shard_info(shard: ShardFile, limits: Limits) -> ShardInfo:
    """As :func:`check_shard`, but the activations and rows are not read: for a shard that was checked before.

    Raises:
        BadInput: as :func:`check_shard`.
    """
    if shard.size > SHARD_BYTES:
        raise BadInput(f"The shard has {shard.size} bytes; at most {SHARD_BYTES} are taken.")
    if shard.part in RECORD_PARTS:
        return _records(shard, limits)
    if limits.agreement.targets == "ids":
        raise BadInput("The shard is a table of rows, but targets are ids here: no table is taken.")
    rows = _first_size(shard, ("rows_UD", "q_UD"))
    _check_layout(shard, rows_layout(limits.agreement.encoding, rows, limits.hidden_size))
    return ShardInfo(shard.size, shard.part, examples=0, tokens=0, targets=0, rows=rows, max_index=-1)


def supervised_bits(shard: ShardFile, tokens: int) -> NDArray[np.bool_]:
    """Which of all positions of a shard are supervised, ``(tokens,)``."""
    return np.unpackbits(shard.read("supervised").numpy(), count=tokens).astype(np.bool_)


def _records(shard: ShardFile, limits: Limits) -> ShardInfo:
    agreement = limits.agreement
    rows = _first_size(shard, ("x_RD", "q_RD", "q_RH"))
    examples, targets = _first_size(shard, ("lengths_B",)), _first_size(shard, ("targets_N",))
    tokens = _first_size(shard, ("rows_T",)) if "rows_T" in shard.tensors else rows
    expected = layout(agreement.encoding, rows, limits.hidden_size) | {
        "lengths_B": (torch.int32, (examples,)),
        "targets_N": (torch.int32, (targets,)),
        "supervised": (torch.uint8, (-(-tokens // 8),)),
    }
    if "rows_T" in shard.tensors:
        expected["rows_T"] = (torch.int32, (tokens,))
    _check_layout(shard, expected)
    _check_channels(shard, limits.hidden_size)

    lengths_B = shard.read("lengths_B").numpy().astype(np.int64)
    if lengths_B.min() <= 0 or lengths_B.sum() != tokens:
        raise BadInput(f"The shard's lengths are not positive or do not sum to its {tokens} positions.")
    if lengths_B.max() > limits.max_positions:
        raise BadInput(
            f"Example {int(lengths_B.argmax())} of the shard has {int(lengths_B.max())} positions; "
            f"at most {limits.max_positions} are taken."
        )
    if "rows_T" in shard.tensors:
        rows_T = shard.read("rows_T").numpy()
        if rows_T.min() < 0 or rows_T.max() >= rows:
            raise BadInput(f"The shard's rows_T points outside its {rows} activations.")
    return ShardInfo(
        bytes=shard.size,
        part=shard.part,
        examples=examples,
        tokens=tokens,
        targets=targets,
        rows=rows,
        max_index=_check_targets(shard, limits, lengths_B, targets),
    )


def _check_targets(shard: ShardFile, limits: Limits, lengths_B: NDArray[np.int64], targets: int) -> int:
    tokens = int(lengths_B.sum())
    supervised_T = supervised_bits(shard, tokens)
    if np.unpackbits(shard.read("supervised").numpy())[tokens:].any():
        raise BadInput(f"The shard supervises positions beyond its {tokens}.")
    if int(supervised_T.sum()) != targets:
        raise BadInput(f"The shard has {targets} targets for {int(supervised_T.sum())} supervised positions.")
    counts_B = np.add.reduceat(supervised_T, np.cumsum(lengths_B) - lengths_B, dtype=np.int64)
    if counts_B.min() == 0:
        raise BadInput(f"Example {int(counts_B.argmin())} of the shard has no supervised position.")
    targets_N = shard.read("targets_N").numpy()
    lowest, highest = int(targets_N.min()), int(targets_N.max())
    what = "id" if limits.agreement.targets == "ids" else "index"
    if lowest < 0 or highest >= limits.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise BadInput(f"The shard has target {what} {wrong}, outside the vocabulary of {limits.vocab_size}.")
    return highest if what == "index" else -1


def _first_size(shard: ShardFile, names: tuple[str, ...]) -> int:
    found = next((shard.tensors[name] for name in names if name in shard.tensors), None)
    if found is None or not found.shape:
        raise BadInput(f"The shard of {shard.part} holds no tensor {' or '.join(names)}.")
    if found.shape[0] == 0:
        raise BadInput(f"The shard of {shard.part} is empty.")
    return found.shape[0]


def _check_layout(shard: ShardFile, expected: Layout) -> None:
    if missing := sorted(expected.keys() - shard.tensors.keys()):
        raise BadInput(f"The shard of {shard.part} lacks {', '.join(missing)}: is it in another encoding?")
    if unknown := shard.tensors.keys() - expected.keys():
        raise BadInput(f"The shard of {shard.part} holds {len(unknown)} tensors that do not belong there.")
    for name, (dtype, shape) in expected.items():
        stored = shard.tensors[name]
        if (stored.dtype, stored.shape) != (dtype, shape):
            raise BadInput(f"The shard's {name} is {stored.dtype} {stored.shape}, not {dtype} {shape}.")


def _check_channels(shard: ShardFile, hidden_size: int) -> None:
    if "q_RH" in shard.tensors and int4_hidden_size(shard.read("q_RH", 0, 1)) != hidden_size:
        raise BadInput(f"The shard's q_RH does not hold {hidden_size} channels.")
    if "outliers_C" in shard.tensors:
        channels_C = shard.read("outliers_C").numpy()
        if (np.diff(channels_C) <= 0).any() or ((channels_C < 0) | (channels_C >= hidden_size)).any():
            raise BadInput(f"The shard's outliers_C are not ascending channels of {hidden_size}.")


def _check_values(shard: ShardFile, name: str) -> None:
    stored = shard.tensors[name]
    row_bytes = max(1, torch.Size(stored.shape[1:]).numel() * stored.dtype.itemsize)
    at_once = max(1, _CHECKED_AT_ONCE // row_bytes)
    for start in range(0, stored.shape[0], at_once):
        stop = min(start + at_once, stored.shape[0])
        if not bool((shard.read(name, start, stop).float().abs() <= LARGEST).all()):
            raise BadInput(
                f"The shard's {name} holds NaN, infinity or a value beyond {LARGEST:g} in rows {start} to {stop - 1}."
            )
