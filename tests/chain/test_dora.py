"""DoRA's linear: forward against peft's, with dropout too; backward against finite differences; norms by parts."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from potluck.chain.dora import row_norms, squares
from potluck.chain.linear import CutLinears
from potluck.chain.low_rank import LoraPart
from potluck.chain.piece import At

HERE = At(seed=3, step=1, micro_batch=0, half=1)
I, R, SCALE = 6, 2, 1.5  # noqa: E741
SIZES = (4, 2, 3)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tensors_of(adapted: Sequence[int], sizes: Sequence[int] = SIZES) -> list[Tensor]:
    """A, B and magnitudes of each."""
    return [
        tensor.requires_grad_()
        for i in adapted
        for tensor in (random(R, I, seed=10 + i), random(sizes[i], R, seed=20 + i), random(sizes[i], seed=30 + i))
    ]


def group(
    adapted: Sequence[int], tensors: Sequence[Tensor], *, bias: bool = True, dropout: float = 0.0, sizes: Sequence[int]
) -> CutLinears:
    W_OI = random(sum(sizes), I, seed=100)
    triples = zip(adapted, tensors[::3], tensors[1::3], tensors[2::3], strict=True)
    return CutLinears(
        "q",
        (W_OI,),
        (random(sum(sizes), seed=101) if bias else None,),
        tuple(sizes),
        tuple(LoraPart(A, B, sum(sizes[:i]), m) for i, A, B, m in triples),
        SCALE,
        dropout,
        squares_O=squares(W_OI, torch.float64),
    )


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("adapted", [(0, 1, 2), (1,), (0, 2)], ids=str)
def test_gradients(adapted: tuple[int, ...], dropout: float) -> None:
    """Finite differences see the norms move too, which have no gradient: they are taken off."""
    x_BSI, tensors = random(2, 3, I, seed=1).requires_grad_(), tensors_of(adapted)
    magnitudes = tensors[2::3]

    def outputs(x: Tensor, *ms: Tensor) -> Tensor:
        parts = [t for i, m in enumerate(ms) for t in (tensors[3 * i].detach(), tensors[3 * i + 1].detach(), m)]
        return group(adapted, parts, sizes=SIZES, dropout=dropout)(x, HERE)

    assert torch.autograd.gradcheck(outputs, (x_BSI, *magnitudes))


class Masked(nn.Module):
    """A given dropout mask, where peft would draw its own."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_outputs_and_gradients_are_pefts_with_the_same_mask(bias: bool, dropout: float) -> None:
    tensors, x_BSI = tensors_of((0,), (5,)), random(2, 3, I, seed=1)
    ours = group((0,), tensors, bias=bias, dropout=dropout, sizes=(5,))
    base = nn.Sequential(nn.Linear(I, 5, bias=bias, dtype=torch.float64))
    base[0].weight.data.copy_(ours.weights_OI[0])
    if bias:
        base[0].bias.data.copy_(ours.biases_O[0])
    config = LoraConfig(r=R, lora_alpha=int(R * SCALE), target_modules=["0"], use_dora=True, lora_dropout=dropout)
    model = get_peft_model(base, config).train()
    layer = model.base_model.model[0]
    theirs = [layer.lora_A.default.weight, layer.lora_B.default.weight, layer.lora_magnitude_vector.default.weight]
    for parameter, tensor in zip(theirs, tensors, strict=True):
        parameter.data.copy_(tensor)
    mask_MI = ours._kept(x_BSI, HERE)
    if mask_MI is not None:
        assert 0 < int((mask_MI == 0).sum()) < mask_MI.numel()
        layer.lora_dropout["default"] = Masked(mask_MI.view_as(x_BSI))
    xs = [x_BSI.clone().requires_grad_() for _ in range(2)]
    weights = random(2, 3, 5, seed=7)
    found, expected = ours(xs[0], HERE), model(xs[1])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for mine, yours in zip([xs[0], *tensors], [xs[1], *theirs], strict=True):
        assert mine.grad is not None
        torch.testing.assert_close(mine.grad, yours.grad, rtol=1e-10, atol=1e-12)


def test_what_is_judged_is_as_it_will_be_used() -> None:
    tensors, x_BSI = tensors_of((0, 1, 2)), random(2, 3, I, seed=1)
    judged = group((0, 1, 2), tensors, dropout=0.5, sizes=SIZES)(x_BSI, At(3, 1, 0, 1, judging=True))
    assert torch.equal(judged, group((0, 1, 2), tensors, sizes=SIZES)(x_BSI, HERE))


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=3),
    chosen=st.sets(st.integers(0, 2), min_size=1),
    scale=st.floats(-3, 3),
)
@settings(deadline=None, max_examples=60)
def test_norms_by_parts_are_those_of_the_whole_matrix(sizes: list[int], chosen: set[int], scale: float) -> None:
    adapted = sorted(i for i in chosen if i < len(sizes)) or [0]
    tensors = [tensor.detach() for tensor in tensors_of(adapted, sizes)]
    W_OI = random(sum(sizes), I, seed=100)
    starts = [sum(sizes[:i]) for i in adapted]
    found_O = row_norms(W_OI, squares(W_OI, torch.float64), scale, tensors[::3], tensors[1::3], starts)
    for A, B, start in zip(tensors[::3], tensors[1::3], starts, strict=True):
        W_OI[start : start + len(B)] += scale * B @ A
    torch.testing.assert_close(found_O, torch.linalg.vector_norm(W_OI, dim=1), rtol=1e-9, atol=1e-9)


def test_a_row_of_zeros_stays_one() -> None:
    A_RI, B_OR, m_O = (t.detach() for t in tensors_of((0,), (3,)))
    W_OI, B_OR = random(3, I, seed=4), torch.zeros_like(B_OR)
    W_OI[1] = 0
    squares_O = squares(W_OI, torch.float64)
    m_O = squares_O.sqrt().requires_grad_()
    linear = CutLinears("q", (W_OI,), (None,), (3,), (LoraPart(A_RI, B_OR, 0, m_O),), SCALE, squares_O=squares_O)
    y_BSO = linear(random(2, 3, I, seed=1), HERE)
    torch.testing.assert_close(y_BSO, random(2, 3, I, seed=1) @ W_OI.T)
    y_BSO.sum().backward()
    assert m_O.grad is not None
    assert m_O.grad[1] == 0
    assert torch.isfinite(m_O.grad).all()


def test_bfloat16_outputs_are_near_and_magnitudes_keep_float32() -> None:
    tensors = [t.detach() for t in tensors_of((0,), (5,))]
    exact = group((0,), tensors, sizes=(5,))
    A_RI, B_OR, m_O = (t.float().requires_grad_() for t in tensors)
    W_OI = exact.weights_OI[0].bfloat16()
    rounded = CutLinears(
        *("q", (W_OI,), (None,), (5,), (LoraPart(A_RI, B_OR, 0, m_O),), SCALE), squares_O=squares(W_OI, torch.float32)
    )
    x_BSI, bias_O = random(2, 3, I, seed=1), exact.biases_O[0]
    assert bias_O is not None
    y_BSO = rounded(x_BSI.bfloat16(), HERE)
    assert y_BSO.dtype == torch.bfloat16
    assert (y_BSO.double() - (exact(x_BSI, HERE) - bias_O)).abs().max() < 0.05
    y_BSO.sum().backward()
    assert m_O.grad is not None
    assert m_O.grad.dtype == torch.float32
