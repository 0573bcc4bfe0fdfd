"""Names of a checkpoint that differ from those of the whole model, as transformers finds them too.

A model that was saved without its head lacks what the whole model's names begin with, and old checkpoints call a norm's
weight and bias gamma and beta.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

_PREFIXES = {"bert": "bert", "gpt2": "transformer", "gpt_neox": "gpt_neox", "roberta": "roberta"}
"""By ``model_type``; ``model`` where it is not listed (transformers' ``base_model_prefix``)."""
_HEADS = ("lm_head.", "embed_out.", "score.", "classifier.", "qa_outputs.", "cls.", "lm_loss.")
_OLD_NORMS = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}

_Stored = TypeVar("_Stored")


def with_prefix(stored: Mapping[str, _Stored], directory: Path) -> dict[str, _Stored]:
    """The same tensors by the names they have in the whole model; heads have no prefix there."""
    renamed = {_renamed(name): tensor for name, tensor in stored.items()}
    if (model_type := _model_type(directory)) is None:
        return renamed
    prefix = _PREFIXES.get(model_type, "model") + "."
    if any(name.startswith(prefix) for name in renamed):
        return renamed
    return {name if name.startswith(_HEADS) else prefix + name: tensor for name, tensor in renamed.items()}


def _renamed(name: str) -> str:
    for old, new in _OLD_NORMS.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _model_type(directory: Path) -> str | None:
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    model_type = content.get("model_type") if isinstance(content, dict) else None
    return model_type if isinstance(model_type, str) else None
