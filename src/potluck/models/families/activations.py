"""A model's activation, by the name its config has."""

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn import functional as F

from potluck.errors import BadInput

_GELU_TANH = partial(F.gelu, approximate="tanh")

_OF_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _GELU_TANH,
    "gelu_pytorch_tanh": _GELU_TANH,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}
"""The same formulas as transformers', each as one operation of torch.

The others are taken from transformers, whose module of activations brings torch's distributed tensors and sympy along:
52 MiB and 0.6 seconds of a device that starts.
"""


def activation(name: str | None) -> Callable[[Tensor], Tensor]:
    """The formula that transformers computes by that name.

    Raises:
        BadInput: there is no such activation.
    """
    if name in _OF_TORCH:
        return _OF_TORCH[name]
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        raise BadInput(f"The model's config names the activation '{name}', which transformers does not know.")
    function: Callable[[Tensor], Tensor] = ACT2FN[name]
    return function
