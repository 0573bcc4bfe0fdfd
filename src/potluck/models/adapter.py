"""Adapters (LoRA, (IA)^3) on disk, in PEFT's format: ``adapter_config.json`` and ``adapter_model.safetensors``."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from potluck.errors import BadInput
from potluck.job_sections import IA3, Adapter
from potluck.models.save import storable

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TEMPLATE_FILE = "chat_template.jinja"

_PREFIX = "base_model.model."  # PeftModel holds LoraModel as base_model, which holds the model as model
_VECTOR = ".ia3_l"
_NO_TARGETS = "dummy-target-modules"  # by which PEFT knows that there are none
_PART = re.compile(r"\.(lora_[^.]+(\..+)?|ia3_l)$")


def linear_of(name: str) -> str | None:
    """The linear, or other module, that a tensor of an adapter belongs to; None where it is no such tensor.

    Tensors of variants that are not supported, such as ``lora_embedding_A``, are an adapter's too.
    """
    part = _PART.search(name)
    return None if part is None else name[: part.start()]


def scales_inputs(linear: str, config: Mapping[str, Any]) -> bool:
    """Whether (IA)^3's vector of a linear scales its inputs, as PEFT finds it out; else it scales its outputs."""
    named = config.get("feedforward_modules") or ()
    if isinstance(named, str):
        return re.fullmatch(named, linear) is not None
    return any(linear.endswith(name) for name in named)


def adapter_config(
    adapter: Adapter,
    base: str,
    targets: Sequence[str],
    *,
    feedforward: Sequence[str] = (),
    inputs_first: bool = False,
    modules_to_save: Sequence[str] = (),
    blocks: Sequence[int] = (),
) -> dict[str, Any]:
    """The content of ``adapter_config.json``: the fields of PEFT's ``LoraConfig`` and ``IA3Config`` that matter here.

    PEFT takes what is left out as it is by default. Importing it to write the others, too, would cost the device that
    saves seconds, and memory where most of it is taken.

    Args:
        adapter: its kind, and a LoRA's rank, alpha, dropout and variants.
        base: the model as the person called it; stock ``peft`` loads it by this name.
        targets: names of the adapted linears; each matches modules of that name or with that last part, as in PEFT.
            None where only modules of ``modules_to_save`` were trained.
        feedforward: of (IA)^3, those of ``targets`` whose inputs are scaled.
        inputs_first: whether the model stores linears as ``[in, out]``.
        modules_to_save: names of modules that were trained whole: those of the head of whole sequences.
        blocks: numbers of the blocks in which a LoRA's names match; all of them if left out.
    """
    content: dict[str, Any] = {
        "target_modules": sorted(set(targets)) or _NO_TARGETS,
        "task_type": "SEQ_CLS" if modules_to_save else "CAUSAL_LM",
        "modules_to_save": list(modules_to_save) or None,
        "base_model_name_or_path": base,
        "fan_in_fan_out": inputs_first,
        "inference_mode": True,
    }
    if isinstance(adapter, IA3):
        return content | {"peft_type": "IA3", "feedforward_modules": sorted(set(feedforward))}
    return content | {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "lora_dropout": adapter.dropout,
        "bias": "none",
        "use_rslora": adapter.use_rslora,
        "use_dora": adapter.use_dora,
        "layers_to_transform": list(blocks) or None,
    }


def write_adapter(
    directory: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], *, chat_template: str | None = None
) -> None:
    """Write an adapter that stock ``peft`` loads strictly.

    Args:
        directory: an existing directory.
        tensors: whole tensors by their name in the model, ``model.layers.0.self_attn.q_proj.lora_A.weight`` of
            shape ``(rank, inputs)`` and ``...lora_B.weight`` of shape ``(outputs, rank)``, ``...lora_magnitude_vector``
            and ``...ia3_l`` of one dimension, and those trained whole.
        config: what :func:`adapter_config` returned.
        chat_template: a template of the job's own; the base model's is not repeated.

    Raises:
        OSError, SafetensorError: the files could not be written (see :func:`potluck.models.save.replace_directory`).
    """
    named = {_PREFIX + name: storable(_as_in_peft(name, tensor, config)) for name, tensor in sorted(tensors.items())}
    save_file(named, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if chat_template is not None:
        (directory / TEMPLATE_FILE).write_text(chat_template, encoding="utf-8")


def _as_in_peft(name: str, tensor: Tensor, config: Mapping[str, Any]) -> Tensor:
    """PEFT keeps vectors of inputs as rows, and those of outputs as columns."""
    if not name.endswith(_VECTOR):
        return tensor
    return tensor[None] if scales_inputs(name.removesuffix(_VECTOR), config) else tensor[:, None]


def read_config(directory: Path) -> dict[str, Any]:
    """The content of an adapter's ``adapter_config.json``; its ``base_model_name_or_path`` names the model.

    Raises:
        BadInput: there is no adapter, or its configuration is damaged or of another kind than LoRA and (IA)^3.
    """
    path = directory / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"{directory} is not an adapter: it has no {CONFIG_FILE}.") from None
    except (OSError, ValueError):
        raise BadInput(f"{path} cannot be read as JSON: copy the adapter again.") from None
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind not in ("LORA", "IA3"):
        raise BadInput(f"{path} says peft_type {kind!r}; only LORA and IA3 adapters are supported.")
    return dict(config)


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """An adapter's tensors by their name in the model, without PEFT's prefix: the inverse of :func:`write_adapter`.

    Raises:
        BadInput: the file is missing or damaged, or holds tensors that are no adapter's.
    """
    path = directory / WEIGHTS_FILE
    try:
        stored: dict[str, torch.Tensor] = load_file(path)
    except FileNotFoundError:
        raise BadInput(f"{directory} has no {WEIGHTS_FILE}: copy the adapter again.") from None
    except (OSError, SafetensorError) as error:
        raise BadInput(f"{path} cannot be read: {error}. Copy the adapter again.") from None
    foreign = [name for name in stored if not name.startswith(_PREFIX)]
    if foreign:
        raise BadInput(f"{path} holds {foreign[0]}, which is no tensor of a PEFT adapter.")
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    return {name: tensor.flatten() if name.endswith(_VECTOR) else tensor for name, tensor in named.items()}
