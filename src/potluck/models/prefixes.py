"""Names of a model that was saved without its head: they lack what the whole model's names begin with."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

_PREFIXES = {"gpt2": "transformer", "gpt_neox": "gpt_neox"}
"""By ``model_type``; ``model`` where it is not listed (transformers' ``base_model_prefix``)."""

_Stored = TypeVar("_Stored")


def with_prefix(stored: Mapping[str, _Stored], directory: Path) -> dict[str, _Stored]:
    """The same tensors by the names they have in the whole model, as transformers finds them too."""
    if (model_type := _model_type(directory)) is None:
        return dict(stored)
    prefix = _PREFIXES.get(model_type, "model") + "."
    if any(name.startswith(prefix) for name in stored):
        return dict(stored)
    return {prefix + name: tensor for name, tensor in stored.items()}


def _model_type(directory: Path) -> str | None:
    try:
        content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    model_type = content.get("model_type") if isinstance(content, dict) else None
    return model_type if isinstance(model_type, str) else None
