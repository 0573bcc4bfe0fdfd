"""Where training stands, on the disk: resumed from it, a run goes on bit for bit as if it had not ended."""

import json
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from potluck.chain.trained import Trained
from potluck.models.durable import move_durably
from potluck.models.optimizer import Optimizer
from potluck.models.save import storable

_STATE = ("exp_avg", "exp_avg_sq", "step")


def save_checkpoint(
    path: Path, trained: Sequence[Trained], optimizer: Optimizer | None, meta: Mapping[str, Any]
) -> None:
    """Write weights and the optimizer's moments, whole or not at all.

    Args:
        path: replaced by renaming.
        trained: what is trained.
        optimizer: over these tensors.
        meta: what else to remember, as JSON.

    Raises:
        OSError, SafetensorError: the disk is full or failed.
    """
    tensors = {t.name: storable(t.local) for t in trained}
    if optimizer is not None:
        for t in trained:
            state = optimizer.state.get(t.local, {})
            tensors |= {f"{t.name}/{name}": storable(state[name]) for name in _STATE if name in state}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        save_file(tensors, partial, metadata={"potluck": json.dumps(dict(meta))})
        move_durably(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def read_meta(path: Path) -> dict[str, Any] | None:
    """What was remembered beside the weights; None where there is no checkpoint, or a damaged one."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads((file.metadata() or {})["potluck"])
            return dict(meta)
    except (OSError, SafetensorError, KeyError, ValueError, TypeError):
        return None


def restore(path: Path, trained: Sequence[Trained], optimizer: Optimizer | None) -> None:
    """Set weights and moments to what :func:`save_checkpoint` wrote for the same tensors.

    Raises:
        KeyError, OSError, SafetensorError: the file is of other tensors, or damaged.
    """
    with safe_open(path, framework="pt") as file:
        names = set(file.keys())
        with torch.no_grad():
            for t in trained:
                t.local.copy_(file.get_tensor(t.name))
                state = {name: file.get_tensor(f"{t.name}/{name}") for name in _STATE if f"{t.name}/{name}" in names}
                if state and optimizer is not None:
                    optimizer.state[t.local] = {name: _placed(name, value, t.local) for name, value in state.items()}


def _placed(name: str, value: Tensor, beside: Tensor) -> Tensor:
    return value if name == "step" and beside.device.type == "cpu" else value.to(beside.device)
