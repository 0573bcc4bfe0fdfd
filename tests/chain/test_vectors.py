"""(IA)^3's linears: outputs against the formula, gradients against finite differences, small steps in bfloat16."""

import pytest
import torch
from torch import Tensor

from potluck.chain.linear import CutLinears
from potluck.chain.piece import At
from potluck.chain.vectors import scaled

HERE = At(seed=3, step=1, micro_batch=0, half=1)
SIZES = (4, 0, 3)
I = 6  # noqa: E741


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("chosen", [(0, 1, 2), (2,), (1,)], ids=str)
def test_outputs_are_scaled_with_their_bias_and_others_are_not(chosen: tuple[int, ...]) -> None:
    vectors = tuple(random(size, seed=i).requires_grad_() if i in chosen else None for i, size in enumerate(SIZES))
    W_OI, bias_O = random(7, I, seed=8), random(7, seed=9)
    x_BSI = random(2, 3, I, seed=1).requires_grad_()

    def outputs(x: Tensor, *given: Tensor) -> Tensor:
        left = iter(given)
        own = tuple(None if vector is None else next(left) for vector in vectors)
        return CutLinears("q", (W_OI,), (bias_O,), SIZES, vectors=own)(x, HERE)

    trained = [vector for vector in vectors if vector is not None]
    l_O = torch.cat([torch.ones(s).double() if v is None else v for v, s in zip(vectors, SIZES, strict=True)])
    torch.testing.assert_close(outputs(x_BSI, *trained), (x_BSI @ W_OI.T + bias_O) * l_O)
    assert torch.autograd.gradcheck(outputs, (x_BSI, *trained))


@pytest.mark.parametrize("columns", [6, 0])
def test_inputs_are_scaled_under_a_row_cut(columns: int) -> None:
    W_OI, l_I = random(5, columns, seed=8), random(columns, seed=2).requires_grad_()
    x_BSI = random(2, 3, columns, seed=1).requires_grad_()

    def outputs(x: Tensor, vector: Tensor) -> Tensor:
        return CutLinears("o", (W_OI,), (None,), (5,), cut_input_of=1, vectors=(vector,))(x, HERE)

    torch.testing.assert_close(outputs(x_BSI, l_I), (x_BSI * l_I) @ W_OI.T)
    if columns:
        assert torch.autograd.gradcheck(outputs, (x_BSI, l_I))


def test_the_vector_itself_is_not_rounded_to_bfloat16() -> None:
    x = torch.linspace(1, 2, 4000).bfloat16().view(1, 1, -1)
    near = torch.full((4000,), 1 + 1.5 * 2.0**-9, requires_grad=True)
    assert near.detach().bfloat16().eq(1).all()
    y = scaled(x, near)
    assert y.dtype == torch.bfloat16
    assert (y.float() - x.float()).sum() > 0.5 * (x.float() * 1.5 * 2.0**-9).sum()
    y.sum().backward()
    assert near.grad is not None
    assert near.grad.dtype == torch.float32
