"""The fields of a model's config as JSON values: all that devices read of it, most of them without transformers.

Importing transformers would cost each device that starts half of its time and eighty MiB.
"""

import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from potluck.errors import BadInput

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_OF_THIS_COPY = ("_name_or_path", "transformers_version")  # differ where the model is the same


class Fields(SimpleNamespace):
    """A config whose fields are read as attributes, as those of transformers' configs are."""

    model_type: str

    def __init__(self, fields: Mapping[str, object]) -> None:
        super().__init__(**fields)


def fields_of(config: "PretrainedConfig") -> dict[str, object]:
    """The config as JSON values, equal for all copies of a model; what has several names is there by each."""
    fields: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    others = {name: fields[own] for name, own in config.attribute_map.items() if own in fields}
    return {name: value for name, value in (fields | others).items() if name not in _OF_THIS_COPY}


def config_from(fields: Mapping[str, object]) -> "PretrainedConfig":
    """The transformers config with these fields.

    Raises:
        BadInput: they are not those of a config that this transformers knows.
    """
    from transformers import CONFIG_MAPPING

    values: dict[str, Any] = dict(fields)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise BadInput(f"The model is of type '{model_type}', which this transformers does not know.")
    try:
        config: PretrainedConfig = CONFIG_MAPPING[model_type](**values)
    except Exception as error:  # a config's own checks raise what they like
        raise BadInput(f"The model's config cannot be used: {' '.join(str(error).split())[:200]}.") from None
    return config
