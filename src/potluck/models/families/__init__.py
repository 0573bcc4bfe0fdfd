"""The model families potluck knows; a new one is one file here and one line below."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from potluck.errors import BadInput
from potluck.models.families.decoder import Decoder
from potluck.models.families.gemma3 import gemma3
from potluck.models.families.llama import llama
from potluck.models.families.mistral import mistral
from potluck.models.families.qwen import qwen2, qwen3

FAMILIES: dict[str, Callable[[Any], Decoder]] = {
    "gemma3_text": gemma3,
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
}
"""``model_type`` of the config to the function that reads it."""


def read_config(directory: Path) -> PretrainedConfig:
    """The model's transformers config.

    Raises:
        BadInput: config.json is missing, unreadable, has a value it cannot have, or is of a type transformers does
            not know (lists the families).
    """
    file = directory / "config.json"
    try:
        content, _ = PretrainedConfig.get_config_dict(directory, local_files_only=True)
        model_type = content.get("model_type")
        if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
            raise BadInput(_unsupported(model_type))
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise BadInput(f"{file} cannot be used: {' '.join(str(error).split())}") from None
    return config


def decoder_of(config: PretrainedConfig) -> Decoder:
    """The family's description of this model.

    Raises:
        BadInput: the family is not supported (lists those that are).
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise BadInput(_unsupported(config.model_type))
    return family(config)


def _unsupported(model_type: str) -> str:
    return f"Models of type '{model_type}' are not supported. Supported: {', '.join(sorted(FAMILIES))}."
