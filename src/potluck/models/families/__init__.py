"""The model families potluck knows; a new one is one file here and one line below."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

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
        BadInput: config.json is missing, unreadable or of a type transformers does not know.
    """
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise BadInput(f"{directory / 'config.json'} cannot be used: {first_line}") from None
    return config


def decoder_of(config: PretrainedConfig) -> Decoder:
    """The family's description of this model.

    Raises:
        BadInput: the family is not supported (lists those that are).
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise BadInput(
            f"Models of type '{config.model_type}' are not supported. Supported: {', '.join(sorted(FAMILIES))}."
        )
    return family(config)
