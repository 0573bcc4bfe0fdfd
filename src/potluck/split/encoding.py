"""What activations and rows of the embedding table travel in and are stored in.

Decoding is a pure function of the stored bytes: scales are bf16 and levels have at most 7 bits, so that their product
is exact in float32 on every machine.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.errors import BadInput

Encoding = Literal["fp32", "bf16", "int8", "int4"]
Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Names of tensors with their dtypes and shapes."""

LARGEST = 1e9
"""No absolute value may be larger; no model's activations come near it, and every encoding holds it."""
GROUP = 32
"""Channels that share a scale in ``int4``."""

_OUTLIERS = {"fp32": 0, "bf16": 0, "int8": 4, "int4": 8}
_INT8_LEVELS = 127
_INT4_LEVELS = 7
_INT4_ZERO = 8  # levels -7..7 are stored as 1..15; 0 marks the unused half byte at the end of an odd row


def outlier_count(encoding: Encoding, hidden_size: int) -> int:
    """How many channels are kept in bf16 beside the integers."""
    return min(_OUTLIERS[encoding], hidden_size)


def outlier_channels(largest_D: Tensor, encoding: Encoding) -> Tensor:
    """The channels to keep in bf16, ascending, int32; ``largest_D`` holds each channel's largest absolute value."""
    order = torch.argsort(largest_D, descending=True, stable=True)
    return order[: outlier_count(encoding, len(largest_D))].sort().values.to(torch.int32)


def encode(x_RD: Tensor, encoding: Encoding, outliers_C: Tensor | None = None) -> dict[str, Tensor]:
    """Activations, a row a token, as they are stored.

    - ``fp32``, ``bf16``: ``x_RD``.
    - ``int8``: ``q_RD`` with one scale a row; ``int4``: ``q_RH``, two levels -7..7 a byte (the even channel in the low
      half), with one scale for each :data:`GROUP` channels. Both: ``scale_RG`` bf16, the largest absolute value over
      the number of levels, rounded up so that no level overflows; ``outliers_C`` int32 and ``outlier_RC`` bf16, the
      channels that are kept beside the integers (there they count as zero).

    Args:
        x_RD: float32, at least one row.
        encoding: how.
        outliers_C: those of the whole shard, where ``x_RD`` is a part of it (see :func:`outlier_channels`); chosen from
            ``x_RD`` if None.

    Raises:
        BadInput: a value is NaN, infinite or beyond :data:`LARGEST`.
    """
    _check(x_RD, "activations")
    if encoding == "fp32":
        return {"x_RD": x_RD}
    if encoding == "bf16":
        return {"x_RD": x_RD.to(torch.bfloat16)}
    if outliers_C is None:
        outliers_C = outlier_channels(x_RD.abs().amax(0), encoding)
    channels = outliers_C.long()
    beside = {"outliers_C": outliers_C, "outlier_RC": x_RD[:, channels].to(torch.bfloat16)}
    rest_RD = x_RD.index_fill(1, channels, 0.0)
    if encoding == "int8":
        q_RD, scale_R1 = _quantized(rest_RD, _INT8_LEVELS)
        return {"q_RD": q_RD.to(torch.int8), "scale_RG": scale_R1, **beside}
    rows, hidden_size = x_RD.shape
    padded = F.pad(rest_RD, (0, -hidden_size % GROUP)).view(rows, -1, GROUP)
    q_RGK, scale_RG1 = _quantized(padded, _INT4_LEVELS)
    q_RD = (q_RGK + _INT4_ZERO).to(torch.uint8).view(rows, -1)[:, :hidden_size]
    halves = F.pad(q_RD, (0, hidden_size % 2)).view(rows, -1, 2)
    return {"q_RH": halves[..., 0] | (halves[..., 1] << 4), "scale_RG": scale_RG1[..., 0], **beside}


def decode(tensors: dict[str, Tensor], hidden_size: int | None = None) -> Tensor:
    """The activations, float32 ``(R, D)``, of what :func:`encode` gave, or of a slice of its rows.

    ``hidden_size`` need not be told: it is seen from the shapes and, in ``int4``, from the first row's last half byte.
    """
    if "x_RD" in tensors:
        return tensors["x_RD"].float()
    scale_RG = tensors["scale_RG"].float()
    if "q_RD" in tensors:
        x_RD = tensors["q_RD"].float() * scale_RG
    else:
        q_RH = tensors["q_RH"]
        hidden_size = hidden_size or int4_hidden_size(q_RH)
        q_RD = torch.stack((q_RH & 15, q_RH >> 4), dim=-1).flatten(1)[:, :hidden_size]
        x_RD = (q_RD.float() - _INT4_ZERO) * scale_RG.repeat_interleave(GROUP, dim=1)[:, :hidden_size]
    x_RD[:, tensors["outliers_C"].long()] = tensors["outlier_RC"].float()
    return x_RD


def int4_hidden_size(q_RH: Tensor) -> int:
    """Channels of packed rows; the first row tells whether the last half byte is one."""
    return 2 * q_RH.shape[1] - int(q_RH[0, -1] >> 4 == 0)


def encode_rows(rows_UD: Tensor, encoding: Encoding) -> dict[str, Tensor]:
    """Rows of the embedding or head table as they are stored; equal rows are equal bytes, whoever sends them.

    ``rows_UD`` for ``fp32`` and ``bf16``; ``q_UD`` int8 with ``scale_U`` bf16 for ``int8`` and ``int4``, whose loss
    in four bits would reach every token that has the row as its target.

    Raises:
        BadInput: as :func:`encode`.
    """
    _check(rows_UD, "rows of the table")
    if encoding == "fp32":
        return {"rows_UD": rows_UD.float()}
    if encoding == "bf16":
        return {"rows_UD": rows_UD.to(torch.bfloat16)}
    q_UD, scale_U1 = _quantized(rows_UD.float(), _INT8_LEVELS)
    return {"q_UD": q_UD.to(torch.int8), "scale_U": scale_U1[:, 0]}


def decode_rows(tensors: dict[str, Tensor]) -> Tensor:
    """The rows, float32 ``(U, D)``, of what :func:`encode_rows` gave, or of a slice of it."""
    if "rows_UD" in tensors:
        return tensors["rows_UD"].float()
    return tensors["q_UD"].float() * tensors["scale_U"].float()[:, None]


def layout(encoding: Encoding, rows: int, hidden_size: int) -> Layout:
    """The tensors :func:`encode` gives."""
    if encoding in ("fp32", "bf16"):
        return {"x_RD": (torch.float32 if encoding == "fp32" else torch.bfloat16, (rows, hidden_size))}
    count = outlier_count(encoding, hidden_size)
    beside: Layout = {"outliers_C": (torch.int32, (count,)), "outlier_RC": (torch.bfloat16, (rows, count))}
    if encoding == "int8":
        return {"q_RD": (torch.int8, (rows, hidden_size)), "scale_RG": (torch.bfloat16, (rows, 1)), **beside}
    packed, groups = -(-hidden_size // 2), -(-hidden_size // GROUP)
    return {"q_RH": (torch.uint8, (rows, packed)), "scale_RG": (torch.bfloat16, (rows, groups)), **beside}


def rows_layout(encoding: Encoding, rows: int, hidden_size: int) -> Layout:
    """The tensors :func:`encode_rows` gives."""
    if encoding in ("fp32", "bf16"):
        return {"rows_UD": (torch.float32 if encoding == "fp32" else torch.bfloat16, (rows, hidden_size))}
    return {"q_UD": (torch.int8, (rows, hidden_size)), "scale_U": (torch.bfloat16, (rows,))}


def bytes_per_row(encoding: Encoding, hidden_size: int) -> int:
    """Bytes of one token's activation: integers or floats, scales and outliers.

    With D channels: fp32 4D; bf16 2D; int8 D + 2 + 2·4; int4 ceil(D/2) + 2·ceil(D/32) + 2·8.
    """
    return _bytes(layout(encoding, 1, hidden_size)) - 4 * outlier_count(encoding, hidden_size)


def bytes_per_table_row(encoding: Encoding, hidden_size: int) -> int:
    """Bytes of one row of a table: fp32 4D; bf16 2D; int8 and int4 D + 2."""
    return _bytes(rows_layout(encoding, 1, hidden_size))


def record_bytes(
    encoding: Encoding,
    hidden_size: int,
    *,
    rows: int,
    tokens: int,
    examples: int,
    targets: int,
    shared: bool,
    table_rows: int = 0,
    negatives: int = 0,
    shards: int = 1,
) -> int:
    """Payload of a contribution in bytes, file headers (under 1 KiB a shard) aside.

    With r = :func:`bytes_per_row`, u = :func:`bytes_per_table_row` and c outlier channels it is

        ``rows·r + shards·4c  +  4·examples + ceil(tokens/8) + 4·targets  +  4·tokens if shared  +
        (table_rows + negatives)·u``

    that is activations with scales and outliers; lengths, supervised bits, and indices (or ids) of the targets; the row
    of each position; tables. Bits fill whole bytes in each shard, which is at most one byte a shard more.

    Args:
        encoding: of activations and tables.
        hidden_size: D.
        rows: activations sent; ``tokens`` less those of prefixes that came before in the same shard.
        tokens: positions of all examples.
        examples: how many.
        targets: supervised positions.
        shared: whether prefixes were shared (in every shard).
        table_rows: distinct targets; 0 where targets are ids.
        negatives: rows drawn at random.
        shards: of records; each names its outlier channels.
    """
    records = rows * bytes_per_row(encoding, hidden_size) + shards * 4 * outlier_count(encoding, hidden_size)
    labels = 4 * examples + -(-tokens // 8) + 4 * targets
    tables = (table_rows + negatives) * bytes_per_table_row(encoding, hidden_size)
    return records + labels + 4 * tokens * shared + tables


def _bytes(tensors: Layout) -> int:
    return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in tensors.values())


def _check(x: Tensor, what: str) -> None:
    if not bool((x.abs() <= LARGEST).all()):
        raise BadInput(
            f"The {what} hold NaN, infinity or a value beyond {LARGEST:g}: the model is damaged or diverged."
        )


def _quantized(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Whole numbers -levels..levels along the last dimension, and its bf16 scale with that dimension kept as 1."""
    exact = x.abs().amax(-1, keepdim=True) / levels
    near = exact.to(torch.bfloat16)
    above = (near.view(torch.int16) + 1).view(torch.bfloat16)  # the next larger of the numbers >= 0
    scale = torch.where(near.float() < exact, above, near)
    divisor = scale.float()
    return (x / torch.where(divisor == 0, 1.0, divisor)).round(), scale
