"""The hand-written norm against autograd and against transformers."""

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from potluck.chain.piece import At
from potluck.chain.residual import AddNorm, LayerNorm, Norm

HERE = At(seed=0, step=0, micro_batch=0, half=0)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 1, 1), (2, 3, 4, 6), (2, 3, 0, 6)], ids=str)
def test_gradients_of_the_norm(shape: tuple[int, ...], offset: float) -> None:
    x, weight_D = random(*shape).requires_grad_(), random(shape[-1], seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: Norm(w, 1e-5, offset)(x), (x, weight_D))


def test_frozen_inputs_get_no_gradient() -> None:
    x, weight_D = random(2, 3, 5), random(5, seed=1).requires_grad_()
    Norm(weight_D, 1e-5)(x).sum().backward()
    assert weight_D.grad is not None
    assert x.grad is None
    frozen = weight_D.detach()
    x.requires_grad_()
    Norm(frozen, 1e-5)(x).sum().backward()
    assert x.grad is not None
    assert frozen.grad is None


@pytest.mark.parametrize(("stock", "offset"), [(LlamaRMSNorm, 0.0), (Gemma3RMSNorm, 1.0)])
def test_the_norm_is_that_of_transformers(stock: type[torch.nn.Module], offset: float) -> None:
    norm = stock(16, eps=1e-5)
    weight_D = random(16, seed=2, dtype=torch.float32)
    norm.load_state_dict({"weight": weight_D})
    x = random(3, 4, 16, dtype=torch.float32) * 30
    assert torch.allclose(Norm(weight_D, 1e-5, offset)(x), norm(x), rtol=1e-5, atol=1e-6)


def test_a_bfloat16_input_is_normed_in_float32() -> None:
    x = random(4, 64).bfloat16()
    normed = Norm(torch.ones(64, dtype=torch.bfloat16), 1e-6)(x)
    assert normed.dtype == torch.float32
    assert torch.allclose(normed.pow(2).mean(-1), torch.ones(4), atol=1e-4)


def test_gradients_through_add_and_norm() -> None:
    x_BSD, r_BSD = random(2, 3, 5).requires_grad_(), random(2, 3, 5, seed=1).requires_grad_()
    weights = [random(5, seed=seed).requires_grad_() for seed in (2, 3, 4)]

    def added(x: Tensor, r: Tensor, weight: Tensor, bias: Tensor, weight_of_sum: Tensor) -> tuple[Tensor, Tensor]:
        piece = AddNorm(Norm(weight, 1e-5), torch.float64, bias_D=bias, norm_of_sum=Norm(weight_of_sum, 1e-5, 1.0))
        return piece(x, r, HERE)

    assert torch.autograd.gradcheck(added, (x_BSD, r_BSD, *weights))


def test_a_normed_stream_is_what_goes_on_and_what_is_read() -> None:
    x_BSD, r_BSD, bias_D = random(2, 3, 5), random(2, 3, 5, seed=1), random(5, seed=2)
    norm = LayerNorm(random(5, seed=3), random(5, seed=4), 1e-5)
    piece = AddNorm(None, torch.float64, bias_D=bias_D, norm_of_stream=norm)
    stream, h_BSD = piece(x_BSD, r_BSD, HERE)
    assert torch.allclose(stream, norm(x_BSD + r_BSD + bias_D))
    assert torch.equal(stream, h_BSD)
    assert torch.equal(piece(x_BSD, None, HERE)[0], norm(x_BSD))


def test_the_first_piece_of_a_chain_only_norms() -> None:
    x_BSD = random(1, 2, 4)
    norm = Norm(random(4, seed=1), 1e-5)
    stream, h_BSD = AddNorm(norm, torch.float64, bias_D=random(4))(x_BSD, None, HERE)
    assert torch.equal(stream, x_BSD)
    assert torch.equal(h_BSD, norm(x_BSD))


def test_the_stream_stays_wide_where_linears_compute_narrow() -> None:
    piece = AddNorm(Norm(torch.ones(8, dtype=torch.bfloat16), 1e-5), torch.bfloat16)
    stream, h_BSD = piece(random(1, 2, 8).float(), random(1, 2, 8).bfloat16(), HERE)
    assert (stream.dtype, h_BSD.dtype) == (torch.float32, torch.bfloat16)
