"""The tensors that training changes, and who holds which part of each."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from potluck.chain.ranges import Ranges

Gradient = Literal["cut", "equal", "partial"]


@dataclass(eq=False)
class Trained:
    """This device's part of one trained tensor of the whole model.

    Every device lists the same tensors in the same order, also where its own part is empty.
    """

    name: str
    """Name in the whole model's state dict, e.g. ``model.layers.0.self_attn.q_proj.lora_A.weight``."""
    local: Tensor
    """This device's part: a float32 (float64 in parity tests) leaf that requires a gradient."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    dim: int | None
    """The dimension that is cut; None if every device holds all of it."""
    held: tuple[Ranges, ...]
    """For each rank, the indices along ``dim`` it holds, in the order of ``local``; empty tuple if not cut.
    Ranges of several ranks overlap where key/value heads are shared."""
    gradient: Gradient
    """``cut``: each part's gradient is whole; ``equal``: replicated, the same on all devices; ``partial``: summed
    over the holders."""
