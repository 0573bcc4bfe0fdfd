"""What an adapter makes of a linear for good: its weight, and its bias where outputs are scaled."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from potluck.errors import BadInput
from potluck.models.adapter import CONFIG_FILE, scales_inputs


@dataclass(frozen=True)
class LowRank:
    """``W + s B A``; with DoRA's magnitudes each row of it is made as long as its magnitude says."""

    a_RI: Tensor
    b_OR: Tensor
    scale: float
    m_O: Tensor | None = None

    @property
    def shape_OI(self) -> tuple[int, int]:
        """Of the weight it fits."""
        return self.b_OR.shape[0], self.a_RI.shape[1]

    @property
    def fits_itself(self) -> bool:
        """Whether its tensors belong together."""
        out, rank = self.b_OR.shape
        return len(self.a_RI) == rank and (self.m_O is None or tuple(self.m_O.shape) == (out,))

    def told(self) -> str:
        """Its shapes."""
        magnitudes = "" if self.m_O is None else f", its magnitudes {tuple(self.m_O.shape)}"
        return f"the adapter's B and A have {tuple(self.b_OR.shape)} and {tuple(self.a_RI.shape)}{magnitudes}"

    def weight(self, W_OI: Tensor) -> Tensor:
        """The merged weight, computed in float32 (float64 for float64 weights), in the dtype of ``W``."""
        exact = _exact(W_OI)
        merged_OI = W_OI.to(exact).add(self.b_OR.to(exact) @ self.a_RI.to(exact), alpha=self.scale)
        if self.m_O is not None:
            norms_O = torch.linalg.vector_norm(merged_OI, dim=1).clamp_min_(torch.finfo(exact).tiny)
            merged_OI *= (self.m_O.to(exact) / norms_O)[:, None]
        return merged_OI.to(W_OI.dtype)

    def bias(self, bias_O: Tensor) -> Tensor:
        """The bias, as it was."""
        return bias_O


@dataclass(frozen=True)
class Scaled:
    """(IA)^3's vector: it scales the columns of ``W``, or its rows and the bias."""

    vector: Tensor
    of_inputs: bool
    shape_OI: tuple[int, int]
    fits_itself: bool = True

    def told(self) -> str:
        """Its shape."""
        return f"the adapter's vector of its {'inputs' if self.of_inputs else 'outputs'} has {len(self.vector)} numbers"

    def weight(self, W_OI: Tensor) -> Tensor:
        """As :meth:`LowRank.weight`."""
        exact = _exact(W_OI)
        vector = self.vector.to(exact)
        return (W_OI.to(exact) * (vector if self.of_inputs else vector[:, None])).to(W_OI.dtype)

    def bias(self, bias_O: Tensor) -> Tensor:
        """The bias; scaled, where outputs are."""
        if self.of_inputs:
            return bias_O
        exact = _exact(bias_O)
        return (bias_O.to(exact) * self.vector.to(exact)).to(bias_O.dtype)


Change = LowRank | Scaled


def changes_of(
    adapter_dir: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    shapes_OI: Mapping[str, tuple[int, int]],
) -> dict[str, Change]:
    """What an adapter changes, by the name of the linear.

    Args:
        adapter_dir: where it lies, for messages.
        config: its configuration.
        tensors: as :func:`potluck.models.adapter.read_tensors` gives them, those of adapters only.
        shapes_OI: of the base's linears, as far as there are such.

    Raises:
        BadInput: a tensor is no part of an adapter of a linear, or the configuration says no scale.
    """
    found: dict[str, Change] = {}
    used: set[str] = set()
    scale = _scale(adapter_dir, config) if config["peft_type"] == "LORA" else 1.0
    for name, tensor in tensors.items():
        linear, suffix, rest = name.partition(".lora_A.weight")
        b_OR = tensors.get(f"{linear}.lora_B.weight")
        if suffix and not rest and b_OR is not None:
            magnitudes = f"{linear}.lora_magnitude_vector"
            found[linear] = LowRank(tensor, b_OR, scale, tensors.get(magnitudes))
            used |= {name, f"{linear}.lora_B.weight", magnitudes}
        elif name.endswith(".ia3_l"):
            linear = name.removesuffix(".ia3_l")
            of_inputs, size = scales_inputs(linear, config), len(tensor)
            out, inputs = shapes_OI.get(linear, (size, size))
            found[linear] = Scaled(tensor, of_inputs, (out, size) if of_inputs else (size, inputs))
            used.add(name)
    if odd := sorted(tensors.keys() - used):
        raise BadInput(f"{adapter_dir} cannot be merged: {odd[0]} is no half of a LoRA pair of a linear.")
    if config.get("use_dora") and (lacking := sorted(n for n, c in found.items() if getattr(c, "m_O", None) is None)):
        raise BadInput(f"{adapter_dir} cannot be merged: it lacks {lacking[0]}.lora_magnitude_vector.")
    return found


def _scale(adapter_dir: Path, config: Mapping[str, Any]) -> float:
    """alpha / rank; alpha / sqrt(rank) where the adapter says ``use_rslora``."""
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        raise BadInput(f"{adapter_dir / CONFIG_FILE} gives no rank 'r' and 'lora_alpha': copy it again.") from None


def _exact(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
