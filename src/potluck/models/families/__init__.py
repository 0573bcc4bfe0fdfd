"""The model families potluck knows; a new one is one file here and one line below."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families.bert import bert
from potluck.models.families.decoder import Decoder, Names, SequenceHead
from potluck.models.families.fields import Fields
from potluck.models.families.gemma import gemma2, gemma3
from potluck.models.families.gpt2 import gpt2
from potluck.models.families.gpt_neox import gpt_neox
from potluck.models.families.granite import granite
from potluck.models.families.llama import llama
from potluck.models.families.mistral import mistral
from potluck.models.families.olmo2 import olmo2
from potluck.models.families.opt import opt
from potluck.models.families.phi3 import phi3
from potluck.models.families.qwen import qwen2, qwen3
from potluck.models.families.roberta import roberta
from potluck.models.families.smollm3 import smollm3
from potluck.models.families.stablelm import stablelm

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    ModelConfig = PretrainedConfig | Fields

FAMILIES: dict[str, Callable[[Any], Decoder]] = {
    "bert": bert,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "granite": granite,
    "llama": llama,
    "mistral": mistral,
    "olmo2": olmo2,
    "opt": opt,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "roberta": roberta,
    "smollm3": smollm3,
    "stablelm": stablelm,
}
"""``model_type`` of the config to the function that reads it."""


def read_config(directory: Path) -> "PretrainedConfig":
    """The model's transformers config.

    Raises:
        BadInput: config.json is missing, unreadable, has a value it cannot have, is of a type transformers does not
            know (lists the families), or says that the weights are quantised (names the method).
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

    file = directory / "config.json"
    try:
        content, _ = PretrainedConfig.get_config_dict(directory, local_files_only=True)
        model_type = content.get("model_type")
        if isinstance(model_type, str) and model_type not in CONFIG_MAPPING:
            raise BadInput(_unsupported(model_type))
        if method := _quantization(content):
            raise BadInput(
                f"The weights in {directory} are quantised ({method}, by the quantization_config in config.json): use"
                " the same model with weights in float32, float16 or bfloat16."
            )
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise BadInput(f"{file} cannot be used: {' '.join(str(error).split())}") from None
    return config


def decoder_of(config: "ModelConfig") -> Decoder:
    """The family's description of this model.

    Raises:
        BadInput: the family is not supported (lists those that are), or fields that a device was told are not those of
            the family.
    """
    try:
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise BadInput(_unsupported(config.model_type))
        return family(config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if not isinstance(config, Fields):
            raise
        raise BadInput(f"The coordinator's description of the model cannot be used ({error}).") from None


def decoder_for(config: "ModelConfig", job: Job) -> Decoder:
    """The description of this model for the job's task.

    Raises:
        BadInput: the family is not supported, or cannot do the task; or nothing would be trained.
    """
    return with_frozen(for_task(decoder_of(config), sequence_of(job)), job.frozen_blocks)


def with_frozen(decoder: Decoder, blocks: int) -> Decoder:
    """The description with its first ``blocks`` blocks frozen; all of them, where a head is trained.

    Raises:
        BadInput: the model has fewer, or nothing would be trained.
    """
    most = len(decoder.layers) - (decoder.sequence is None)
    if blocks > most:
        trained = ", one of which must be trained" if decoder.sequence is None else ""
        raise BadInput(
            f"frozen_blocks is {blocks}, but the model has {len(decoder.layers)} blocks{trained}: 0 to {most} can be"
            " frozen."
        )
    return replace(decoder, frozen_blocks=blocks)


def sequence_of(job: Job) -> SequenceHead | None:
    """What a job's model is to tell of whole sequences; two classes, where it does not say which there are."""
    if job.task == "causal-lm":
        return None
    if job.task == "sequence-regression":
        return SequenceHead("value", 1)
    return SequenceHead("classes", len(job.data.labels) or 2)


def for_task(decoder: Decoder, sequence: SequenceHead | None) -> Decoder:
    """The description with its head of whole sequences, or (None) of tokens.

    Raises:
        BadInput: the family has no such head.
    """
    if sequence is None and decoder.bidirectional:
        raise BadInput(
            "This model is an encoder, which reads a text as a whole and says no tokens: set task:"
            " sequence-classification or sequence-regression."
        )
    if sequence is not None and decoder.names.classifier is None:
        raise BadInput(
            "transformers has no classification head for this family of models, so that its result could not be"
            " loaded: use task: causal-lm, or another model."
        )
    return replace(decoder, sequence=sequence)


def known(config: "ModelConfig") -> Decoder | None:
    """The description of this model; None where potluck does not know it, as it need not to use it."""
    try:
        return decoder_of(config)
    except BadInput:
        return None


def names_of(config: "ModelConfig") -> Names:
    """What the family calls its tensors; as most do where potluck does not know it."""
    family = FAMILIES.get(config.model_type)
    return Names() if family is None else family(config).names


def _quantization(content: Mapping[str, Any]) -> str:
    """The method by which a config says that weights are quantised; empty where they are not."""
    said = content.get("quantization_config") or content.get("compression_config")
    if not said:
        return ""
    fields = said if isinstance(said, dict) else {}
    method = fields.get("quant_method") or fields.get("quant_algo")
    bits = next((f"{width}-bit" for width in (4, 8) if fields.get(f"load_in_{width}bit")), "")
    return " ".join(filter(None, (str(method or ("bitsandbytes" if bits else "of an unnamed method")), bits)))


def _unsupported(model_type: str) -> str:
    from transformers import CONFIG_MAPPING

    kind = _other_kind(CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else ""
    return f"Models of type '{model_type}' {kind}are not supported. Supported: {', '.join(sorted(FAMILIES))}."


def _other_kind(config: "type[PretrainedConfig]") -> str:
    """What a family is that is no row of blocks of attention and MLP, as far as its config's fields tell."""
    fields = set(inspect.signature(config.__init__).parameters) | set(vars(config)) | set(config.attribute_map)
    if fields & _EXPERTS:
        return "(mixture of experts) "
    return "(state-space) " if fields & _STATES else ""


_EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok"}
_STATES = {"state_size", "mamba_d_state", "ssm_state_size", "mamba_num_heads", "lru_width", "attention_hidden_size"}
