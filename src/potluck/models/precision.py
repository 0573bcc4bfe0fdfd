"""Which dtype a device's linears are fastest in."""

import time

import torch
import torch.nn.functional as F

_ROWS = 256
_GAIN = 1.2  # bfloat16 rounds, so it must pay


def choose_dtype(asked: str, hidden_size: int, intermediate_size: int) -> str:
    """``asked``, or for ``auto`` the faster of ``fp32`` and ``bf16`` in a linear's forward and backward here.

    bfloat16 is twice or more as fast with AMX or AVX512-BF16, far slower without, and has no backward on some CPUs.
    """
    if asked != "auto":
        return asked
    fp32_s = _linear_s(torch.float32, hidden_size, intermediate_size)
    try:
        bf16_s = _linear_s(torch.bfloat16, hidden_size, intermediate_size)
    except RuntimeError:
        return "fp32"
    return "bf16" if bf16_s * _GAIN < fp32_s else "fp32"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype a job names."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[name]


def _linear_s(dtype: torch.dtype, hidden_size: int, intermediate_size: int) -> float:
    x = torch.randn(_ROWS, hidden_size).to(dtype).requires_grad_()
    weight = torch.randn(intermediate_size, hidden_size).to(dtype)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        F.linear(x, weight).sum().backward()
        times.append(time.perf_counter() - start)
    return sorted(times)[2]
