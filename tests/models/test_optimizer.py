"""Lion's steps in slices, against the library's own of whole tensors."""

import pytest
import torch
from lion_pytorch import Lion
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("name", SHAPES)
def test_sliced_steps_are_those_of_the_whole_tensor(name: str, transposed: bool) -> None:
    shape = SHAPES[name]
    mine, plain = (trained(shape, transposed and len(shape) == 2) for _ in range(2))
    sliced = optimizer_of([mine], "lion", RATE, DECAY)
    assert sliced is not None
    whole = Lion([plain], lr=RATE, weight_decay=DECAY if len(shape) > 1 else 0.0)
    for step in range(3):
        for tensor, optimizer in ((mine, sliced), (plain, whole)):
            give_gradients(tensor, step)
            optimizer.param_groups[0]["lr"] = RATE / (step + 1)
            optimizer.step()
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
    optimizer = optimizer_of([table], "lion", RATE, DECAY)
    assert optimizer is not None
    give_gradients(table, 0)
    optimizer.step()  # which makes the moment
    with _Made() as made:
        optimizer.step()
    assert 0 < made.most <= LARGE
