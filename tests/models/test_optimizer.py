"""Steps, bit for bit those of the libraries' own optimizers; Lion's in slices too; without torch's compiler."""

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lion_pytorch import Lion
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from potluck.job_sections import OptimizerName
from potluck.models.optimizer import optimizer_of

LARGE = 1 << 20
RATE, DECAY = 1e-2, 0.3
SHAPES = {
    "wide rows": (3000, 577),
    "one row": (1, LARGE + 7),
    "rows larger than a slice": (2, LARGE + 7),
    "vector": (2 * LARGE + 7,),
    "small": (3, 5),
    "empty": (0, 5),
    "number": (),
}


def trained(shape: tuple[int, ...], transposed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(shape[::-1] if transposed else shape, generator=generator)
    return (values.t() if transposed else values).requires_grad_()


def give_gradients(tensor: Tensor, step: int) -> None:
    tensor.grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(step))


def library(tensors: Sequence[Tensor], kind: OptimizerName) -> torch.optim.Optimizer:
    groups = [
        {"params": [t for t in tensors if t.ndim > 1], "weight_decay": DECAY},
        {"params": [t for t in tensors if t.ndim <= 1], "weight_decay": 0.0},
    ]
    return Lion(groups, lr=RATE) if kind == "lion" else torch.optim.AdamW(groups, lr=RATE, fused=True)


def mixed(dtype: torch.dtype, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = ((7, 5), (64, 33), (2, 3, 4), (41,), (6,), ())
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    return [t.to(device, dtype).requires_grad_() for t in (*tensors, tensors[1].t())]


GIVEN = ({0, 1, 3, 6}, {1, 2, 3, 4, 5, 6}, {0, 1, 2}, {4, 5}, set(), {0, 1, 2, 3, 4, 5, 6})
"""Which of the tensors have a gradient in each step: for some it comes late, for some groups there is none at all."""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_steps_are_those_of_the_library(kind: OptimizerName, dtype: torch.dtype, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    mine, plain = mixed(dtype, device), mixed(dtype, device)
    stepped, reference = optimizer_of(mine, kind, DECAY), library(plain, kind)
    assert stepped is not None
    for step, given in enumerate(GIVEN):
        generator = torch.Generator().manual_seed(step)
        for index, (a, b) in enumerate(zip(mine, plain, strict=True)):
            gradient = torch.randn(a.shape, generator=generator, dtype=torch.float64).to(device, dtype)
            for tensor in (a, b):
                tensor.grad = gradient.clone() if index in given else None
        for tensors in (mine, plain):
            torch.nn.utils.clip_grad_norm_(tensors, 0.5)
        gradients = stepped.gradients()
        assert {id(g) for g in gradients} == {id(mine[index].grad) for index in given}
        assert len(gradients) == len(given)
        stepped.step(RATE / (step + 1))
        for group in reference.param_groups:
            group["lr"] = RATE / (step + 1)
        reference.step()
        for a, b in zip(mine, plain, strict=True):
            assert torch.equal(a, b)
            assert_same_state(stepped.state.get(a), reference.state.get(b))
    assert len(stepped.state) == len(mine)


def assert_same_state(kept: dict[str, Tensor] | None, expected: dict[str, Any] | None) -> None:
    assert (kept or {}).keys() == (expected or {}).keys()
    for name, value in (kept or {}).items():
        assert (value.dtype, value.device) == (expected[name].dtype, expected[name].device)
        assert value.stride() == expected[name].stride()
        assert torch.equal(value, expected[name])


def test_vectors_do_not_decay_and_where_nothing_is_trained_is_no_optimizer() -> None:
    matrix, vector = torch.ones(2, 2), torch.ones(2)
    optimizer = optimizer_of([matrix, vector], "adamw", DECAY)
    assert optimizer is not None
    for tensor in (matrix, vector):
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step(0.5)
    assert torch.allclose(matrix, torch.full((2, 2), 1 - 0.5 * DECAY))
    assert torch.equal(vector, torch.ones(2))
    assert optimizer_of([], "adamw", DECAY) is None


@pytest.mark.parametrize("kind", ["adamw", "lion"])
def test_a_step_does_not_import_the_compiler(kind: str) -> None:
    program = (
        "import sys, torch\n"
        "from potluck.models.optimizer import optimizer_of\n"
        "weight = torch.ones(3, 3, requires_grad=True)\n"
        f"optimizer = optimizer_of([weight], '{kind}', 0.1)\n"
        "weight.square().sum().backward()\n"
        "optimizer.step(0.1)\n"
        "print(bool((weight < 1).all()), sorted({'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", SHAPES)
def test_sliced_steps_are_those_of_the_whole_tensor(name: str, transposed: bool) -> None:
    shape = SHAPES[name]
    mine, plain = (trained(shape, transposed and len(shape) == 2) for _ in range(2))
    sliced = optimizer_of([mine], "lion", DECAY)
    assert sliced is not None
    whole = Lion([plain], lr=RATE, weight_decay=DECAY if len(shape) > 1 else 0.0)
    for step in range(3):
        for tensor in (mine, plain):
            give_gradients(tensor, step)
        sliced.step(RATE / (step + 1))
        whole.param_groups[0]["lr"] = RATE / (step + 1)
        whole.step()
        assert torch.equal(mine, plain)
        kept, expected = sliced.state[mine], whole.state[plain]
        assert kept.keys() == expected.keys()
        assert torch.equal(kept["exp_avg"], expected["exp_avg"])


class _Made(TorchDispatchMode):
    """Notes the largest tensor that has memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
            self.most = max(self.most, result.untyped_storage().nbytes())
        return result


def test_what_a_step_makes_on_its_way_is_small() -> None:
    table = trained((5 * 1024, 1024))
    optimizer = optimizer_of([table], "lion", DECAY)
    assert optimizer is not None
    give_gradients(table, 0)
    optimizer.step(RATE)  # which makes the moment
    with _Made() as made:
        optimizer.step(RATE)
    assert 0 < made.most <= LARGE
