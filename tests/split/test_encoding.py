import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from potluck.errors import BadInput
from potluck.split.encoding import (
    GROUP,
    Encoding,
    bytes_per_row,
    bytes_per_table_row,
    decode,
    decode_rows,
    encode,
    encode_rows,
    layout,
    outlier_channels,
    rows_layout,
)

ENCODINGS: list[Encoding] = ["fp32", "bf16", "int8", "int4"]
SIZES = [1, 2, 3, 7, 32, 33, 40, 45, 64, 101]
BF16_STEP = 2.0**-7  # between neighbours, relative


def _normal(rows: int, D: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    x_RD = torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)) * scale
    x_RD[:, D // 2] *= 50
    return x_RD


def _step(x_RD: Tensor, tensors: dict[str, Tensor], encoding: Encoding) -> Tensor:
    """The largest error each value may have."""
    if encoding == "fp32":
        return torch.zeros_like(x_RD)
    half = x_RD.abs() * BF16_STEP / 2 * 1.01
    if encoding == "bf16":
        return half
    scale_RG = tensors["scale_RG"].float()
    scales = scale_RG.repeat_interleave(GROUP, 1)[:, : x_RD.shape[1]] if encoding == "int4" else scale_RG
    bound = scales.expand_as(x_RD) * 0.5001
    outliers = tensors["outliers_C"].long()
    return bound.index_copy(1, outliers, half[:, outliers])


@given(st.sampled_from(ENCODINGS), st.sampled_from(SIZES), st.integers(1, 6), st.integers(0, 99), st.floats(1e-6, 1e6))
def test_decoding_gives_values_within_a_step(encoding: Encoding, D: int, rows: int, seed: int, scale: float) -> None:
    x_RD = _normal(rows, D, seed, scale)
    tensors = encode(x_RD, encoding)
    decoded = decode(tensors)
    assert decoded.dtype == torch.float32
    assert decoded.shape == x_RD.shape
    assert bool(((decoded - x_RD).abs() <= _step(x_RD, tensors, encoding)).all())
    assert torch.equal(decode(tensors, D), decoded)


@pytest.mark.parametrize(("encoding", "D"), [*itertools.product(ENCODINGS, SIZES)])
def test_a_slice_of_rows_decodes_alone(encoding: Encoding, D: int) -> None:
    tensors = encode(_normal(9, D), encoding)
    some = {name: tensor if name == "outliers_C" else tensor[3:5] for name, tensor in tensors.items()}
    assert torch.equal(decode(some), decode(tensors)[3:5])


@pytest.mark.parametrize(("encoding", "D"), [*itertools.product(ENCODINGS, SIZES)])
def test_tensors_are_as_laid_out_and_as_large_as_the_formula_says(encoding: Encoding, D: int) -> None:
    tensors = encode(_normal(6, D), encoding)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()} == layout(encoding, 6, D)
    per_row = sum(tensor.nbytes for name, tensor in tensors.items() if name != "outliers_C")
    assert per_row == 6 * bytes_per_row(encoding, D)
    rows = encode_rows(_normal(6, D), encoding)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in rows.items()} == rows_layout(encoding, 6, D)
    assert sum(tensor.nbytes for tensor in rows.values()) == 6 * bytes_per_table_row(encoding, D)


def test_bytes_of_a_row_by_hand() -> None:
    assert [bytes_per_row(encoding, 576) for encoding in ENCODINGS] == [2304, 1152, 586, 288 + 36 + 16]
    assert bytes_per_row("int4", 45) == 23 + 4 + 16
    assert [bytes_per_table_row(encoding, 576) for encoding in ENCODINGS] == [2304, 1152, 578, 578]


def test_outliers_are_the_largest_channels_and_do_not_spoil_the_scale() -> None:
    x_RD = torch.full((3, 40), 0.5)
    x_RD[1, [30, 7, 12, 2]] = torch.tensor([-900.0, 800.0, 700.0, -600.0])
    tensors = encode(x_RD, "int8")
    assert tensors["outliers_C"].tolist() == [2, 7, 12, 30]
    assert float(tensors["scale_RG"].float().max()) < 0.004
    assert torch.allclose(decode(tensors), x_RD, rtol=BF16_STEP, atol=1e-3)


def test_ties_between_channels_go_to_the_first() -> None:
    assert outlier_channels(torch.ones(20), "int8").tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("encoding", ["int8", "int4"])
def test_outliers_may_be_given_for_a_part_of_a_shard(encoding: Encoding) -> None:
    x_RD = _normal(8, 45)
    whole = encode(x_RD, encoding)
    part = encode(x_RD[2:4], encoding, whole["outliers_C"])
    assert torch.equal(decode(part), decode(whole)[2:4])


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -2e9])
def test_values_that_no_model_has_are_refused(encoding: Encoding, value: float) -> None:
    x_RD = torch.ones(4, 32)
    x_RD[2, 5] = value
    with pytest.raises(BadInput, match="activations hold NaN"):
        encode(x_RD, encoding)
    with pytest.raises(BadInput, match="rows of the table hold NaN"):
        encode_rows(x_RD, encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_zeros_and_the_smallest_numbers_stay_finite(encoding: Encoding) -> None:
    x_RD = torch.tensor([[0.0] * 45, [1e-45] * 45, [1e-38] * 45])
    assert torch.allclose(decode(encode(x_RD, encoding)), x_RD, atol=1e-38)
    assert torch.allclose(decode_rows(encode_rows(x_RD, encoding)), x_RD, atol=1e-38)


@given(st.sampled_from(ENCODINGS), st.integers(0, 99))
def test_equal_rows_are_equal_bytes_whoever_sends_them(encoding: Encoding, seed: int) -> None:
    row_D, mine_UD, theirs_UD = _normal(1, 45, seed), _normal(3, 45, seed + 1), _normal(5, 45, seed + 2, 1e3)
    mine = encode_rows(torch.cat((row_D, mine_UD)), encoding)
    theirs = encode_rows(torch.cat((theirs_UD, row_D)), encoding)
    for name in mine:
        assert torch.equal(mine[name][0], theirs[name][-1])
    assert torch.equal(decode_rows(mine)[0], decode_rows(theirs)[-1])
    error = (decode_rows(mine)[0] - row_D[0]).abs().max()
    assert float(error) <= float(row_D.abs().max()) * (0 if encoding == "fp32" else BF16_STEP)
