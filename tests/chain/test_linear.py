"""Groups of cut linears with adapters: forward against the formula, backward against finite differences."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.chain.linear import CutLinears
from potluck.chain.low_rank import LoraPart
from potluck.chain.piece import At

HERE = At(seed=3, step=1, micro_batch=0, half=1)
I, R = 6, 2  # noqa: E741
SIZES = (4, 2, 3)


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def group(
    adapted: Sequence[int], tensors: Sequence[Tensor], *, sizes: tuple[int, ...] = SIZES, bias: bool, dropout: float
) -> CutLinears:
    """Linears of ``sizes`` over one input, of which those numbered ``adapted`` have adapters made of ``tensors``."""
    parts = [LoraPart(A, B, sum(sizes[:i])) for i, A, B in zip(adapted, tensors[::2], tensors[1::2], strict=True)]
    return CutLinears(
        "q",
        (random(sum(sizes), I, seed=100),),
        (random(sum(sizes), seed=101) if bias else None,),
        sizes,
        tuple(parts),
        scale=1.5,
        dropout=dropout,
    )


def adapter_tensors(adapted: Sequence[int], sizes: tuple[int, ...] = SIZES) -> list[Tensor]:
    return [
        tensor
        for i in adapted
        for tensor in (random(R, I, seed=10 + i).requires_grad_(), random(sizes[i], R, seed=20 + i).requires_grad_())
    ]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapted", [(0, 1, 2), (1,), (0, 2), (2,)], ids=str)
def test_gradients(adapted: tuple[int, ...], bias: bool, dropout: float) -> None:
    x_BSI = random(2, 3, I, seed=1).requires_grad_()

    def outputs(x: Tensor, *tensors: Tensor) -> Tensor:
        return group(adapted, tensors, bias=bias, dropout=dropout)(x, HERE)

    assert torch.autograd.gradcheck(outputs, (x_BSI, *adapter_tensors(adapted)))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_gradients_of_one_linear_alone(dropout: float) -> None:
    def outputs(x: Tensor, *tensors: Tensor) -> Tensor:
        return group((0,), tensors, sizes=(5,), bias=False, dropout=dropout)(x, HERE)

    x_BSI = random(2, 3, I, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(outputs, (x_BSI, *adapter_tensors((0,), (5,))))


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple),
    chosen=st.sets(st.integers(0, 2)),
    bias=st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_each_output_is_its_own_linear_with_its_own_adapter(
    sizes: tuple[int, ...], chosen: set[int], bias: bool
) -> None:
    adapted = sorted(i for i in chosen if i < len(sizes))
    tensors = adapter_tensors(adapted, sizes)
    linears = group(adapted, tensors, sizes=sizes, bias=bias, dropout=0.0)
    x_BSI = random(2, 3, I, seed=1)
    outputs_BSO = linears(x_BSI, HERE)
    assert outputs_BSO.shape == (2, 3, sum(sizes))
    rows_of_each = zip(outputs_BSO.split(sizes, -1), linears.weights_OI[0].split(sizes), strict=True)
    for i, (y_BSO, W_OI) in enumerate(rows_of_each):
        expected = x_BSI @ W_OI.T
        bias_O = linears.biases_O[0]
        if bias_O is not None:
            expected = expected + bias_O.split(sizes)[i]
        if i in adapted:
            A_RI, B_OR = tensors[2 * adapted.index(i)], tensors[2 * adapted.index(i) + 1]
            expected = expected + 1.5 * (x_BSI @ A_RI.T) @ B_OR.T
        assert torch.allclose(y_BSO, expected, rtol=1e-12, atol=1e-12)


def test_a_frozen_input_gets_no_gradient_and_adapters_do() -> None:
    tensors = adapter_tensors((0, 1, 2))
    group((0, 1, 2), tensors, bias=True, dropout=0.0)(random(2, 3, I, seed=1), HERE).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in tensors)


def test_trained_linears_of_a_group_have_gradients_of_their_own() -> None:
    weights = tuple(random(size, I, seed=i).requires_grad_() for i, size in enumerate(SIZES))
    biases = tuple(random(size, seed=9 + i).requires_grad_() for i, size in enumerate(SIZES))
    x_BSI = random(2, 3, I, seed=1).requires_grad_()

    def outputs(x: Tensor, *tensors: Tensor) -> Tensor:
        return CutLinears("q", tensors[:3], tensors[3:], SIZES)(x, HERE)

    assert torch.autograd.gradcheck(outputs, (x_BSI, *weights, *biases))
    apart = [x_BSI @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)]
    assert torch.allclose(outputs(x_BSI, *weights, *biases), torch.cat(apart, -1), rtol=1e-12, atol=1e-12)


def test_no_rows_give_empty_outputs_and_zero_gradients() -> None:
    A_RI, B_OR = random(R, I, seed=1).requires_grad_(), torch.zeros(0, R, dtype=torch.float64, requires_grad=True)
    linears = CutLinears("q", (torch.zeros(0, I, dtype=torch.float64),), (None,), (0,), (LoraPart(A_RI, B_OR, 0),))
    x_BSI = random(2, 3, I, seed=1).requires_grad_()
    y_BSO = linears(x_BSI, HERE)
    assert y_BSO.shape == (2, 3, 0)
    y_BSO.sum().backward()
    assert x_BSI.grad is not None
    assert A_RI.grad is not None
    assert torch.equal(x_BSI.grad, torch.zeros_like(x_BSI))
    assert torch.equal(A_RI.grad, torch.zeros_like(A_RI))


def test_no_columns_give_a_zero_partial_sum() -> None:
    A_RI, B_OR = torch.zeros(R, 0, dtype=torch.float64, requires_grad=True), random(5, R, seed=2).requires_grad_()
    linears = CutLinears("o", (torch.zeros(5, 0, dtype=torch.float64),), (None,), (5,), (LoraPart(A_RI, B_OR, 0),))
    y_BSO = linears(torch.zeros(2, 3, 0, dtype=torch.float64, requires_grad=True), HERE)
    assert torch.equal(y_BSO, torch.zeros(2, 3, 5, dtype=torch.float64))
    y_BSO.sum().backward()
    assert B_OR.grad is not None
    assert torch.equal(B_OR.grad, torch.zeros_like(B_OR))


def test_bfloat16_outputs_and_float32_gradients_of_float32_adapters() -> None:
    A_RI, B_OR = (t.detach().float().requires_grad_() for t in adapter_tensors((0,), (5,)))
    W_OI = random(5, I, seed=5).bfloat16()
    linears = CutLinears("q", (W_OI,), (None,), (5,), (LoraPart(A_RI, B_OR, 0),))
    y_BSO = linears(random(2, 3, I, seed=1).bfloat16(), HERE)
    assert y_BSO.dtype == torch.bfloat16
    y_BSO.sum().backward()
    assert A_RI.grad is not None
    assert A_RI.grad.dtype == torch.float32
