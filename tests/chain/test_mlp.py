"""The gated MLP: its own backward against finite differences and the textbook, any columns of it."""

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.chain.linear import CutLinears
from potluck.chain.mlp import GatedMlp, _Gated
from potluck.chain.piece import At

HERE = At(seed=0, step=0, micro_batch=0, half=0)
D, COLUMNS = 4, 7
ACTIVATIONS = [F.silu, partial(F.gelu, approximate="tanh")]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(gate_FD: Tensor, up_FD: Tensor, down_DF: Tensor, activation: Callable[[Tensor], Tensor] = F.silu) -> GatedMlp:
    return GatedMlp(
        CutLinears("gate", (gate_FD, up_FD), (None, None), (len(gate_FD), len(up_FD))),
        CutLinears("down", (down_DF,), (None,), (len(down_DF),), cut_input_of=0),
        activation,
    )


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "gelu"])
@pytest.mark.parametrize("columns", [0, 1, 5])
@pytest.mark.parametrize("positions", [0, 3])
def test_gradient_of_the_gated_activation(positions: int, columns: int, activation: Callable[[Tensor], Tensor]) -> None:
    gate_up_BS2F = random(2, positions, 2 * columns).requires_grad_()
    assert _Gated.apply(gate_up_BS2F, activation).shape == (2, positions, columns)
    assert torch.autograd.gradcheck(lambda gate_up: _Gated.apply(gate_up, activation), (gate_up_BS2F,))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=["silu", "gelu"])
@pytest.mark.parametrize("columns", [0, 1, 5])
def test_gradients_through_the_whole_piece(columns: int, activation: Callable[[Tensor], Tensor]) -> None:
    shapes = [(2, 3, D), (columns, D), (columns, D), (D, columns)]
    tensors = [random(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(lambda h, *weights: mlp(*weights, activation)(h, HERE), tensors)


@given(holders=st.lists(st.integers(0, 2), min_size=COLUMNS, max_size=COLUMNS))
@settings(deadline=None, max_examples=30)
def test_partial_sums_of_any_columns_add_up_to_the_textbook(holders: Sequence[int]) -> None:
    gate_FD, up_FD, down_DF = random(COLUMNS, D, seed=1), random(COLUMNS, D, seed=2), random(D, COLUMNS, seed=3)
    h_BSD = random(2, 3, D, seed=4)
    parts = []
    for rank in range(3):
        mine = [column for column, holder in enumerate(holders) if holder == rank]
        parts.append(mlp(gate_FD[mine], up_FD[mine], down_DF[:, mine])(h_BSD, HERE))
        assert mine or torch.equal(parts[-1], torch.zeros_like(h_BSD))
    whole = (F.silu(h_BSD @ gate_FD.T) * (h_BSD @ up_FD.T)) @ down_DF.T
    assert torch.allclose(torch.stack(parts).sum(0), whole, rtol=1e-12, atol=1e-12)


def test_the_activation_is_computed_again_and_not_kept() -> None:
    kept: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    gate_up_BS2F = random(2, 3, 10).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _Gated.apply(gate_up_BS2F, F.silu)
    assert kept == [(2, 3, 10)]
