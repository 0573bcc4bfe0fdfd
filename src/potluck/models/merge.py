"""An adapter added to its base model for good: a plain checkpoint, made one tensor at a time."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from potluck.errors import BadInput
from potluck.job import JOB_FILE
from potluck.models.adapter import CONFIG_FILE, TEMPLATE_FILE, linear_of, read_config, read_tensors
from potluck.models.changes import Change, changes_of
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, known, names_of
from potluck.models.families import read_config as read_model_config
from potluck.models.families.decoder import Decoder, SequenceHead
from potluck.models.save import CheckpointWriter, copy_beside_weights, replace_directory
from potluck.models.sequence_head import is_of_base, kind_in_job, write_sequence_config
from potluck.models.shapes import check_shapes
from potluck.models.targets import named_by

# fields of an adapter's configuration that change what it computes beyond what models.changes does
_UNSUPPORTED = (
    "lora_bias",
    "rank_pattern",
    "alpha_pattern",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
)


def merge(adapter_dir: Path, base_dir: Path, output: Path, overwrite: bool, *, along: Sequence[str] = ()) -> None:
    """Write the model with its adapter (LoRA with its variants rsLoRA and DoRA, or (IA)^3) merged in.

    Sums and products are taken in float32 (float64 for float64 weights) and stored in the base's dtype. Tokenizer and
    configuration are copied; a chat template of the adapter's own wins, and files of the adapter's named in ``along``
    come too, where it has them.
    Modules that were trained whole beside the adapter, those of a head of whole sequences, take the place of the
    base's; what it tells is read from the job beside the adapter. Memory holds one tensor and one shard.

    Raises:
        BadInput: the adapter is none, is of a kind that cannot be merged, lacks tensors of linears that its
            configuration names (in families that potluck knows), or does not fit the base; or ``output`` may
            not be written.
        SaveFailed: the disk is full.
    """
    for source in (adapter_dir, base_dir):
        if source.resolve().is_relative_to(output.resolve()):
            raise BadInput(f"{output} is or holds {source}: name another directory for the merged model.")
    config = read_config(adapter_dir)
    _check_supported(adapter_dir, config)
    inputs_first = bool(config.get("fan_in_fan_out"))
    tensors, model_config = read_tensors(adapter_dir), read_model_config(base_dir)
    with Checkpoint.open(base_dir) as base:
        adapters, head = _without_head(adapter_dir, config, _without_copies(adapter_dir, base, tensors))
        if (description := known(model_config)) is not None:
            check_shapes(base, replace(description, sequence=SequenceHead("classes", 2) if head else None))
        changes = changes_of(adapter_dir, config, adapters, _shapes(base, inputs_first))
        if description is not None:
            _check_whole(adapter_dir, config, changes, description)
        decoder = decoder_of(model_config) if head else None
        names = [name for name in _stored_once(base_dir, base) if decoder is None or is_of_base(name, decoder)]
        names = [name for name in names if name not in head]
        _check_fit(adapter_dir, base, names, changes, inputs_first)
        with replace_directory(output, overwrite) as directory:
            writer = CheckpointWriter(directory)
            for name in names:
                writer.add(name, _merged(name, base.read(name), changes, inputs_first))
            for name, tensor in head.items():
                writer.add(name, tensor.to(base.dtype(names[0])))
            writer.finish()
            copy_beside_weights(base_dir, directory)
            if decoder is not None:
                _say_what_it_tells(adapter_dir, directory, head, decoder)
            for file_name in (TEMPLATE_FILE, *along):
                if (adapter_dir / file_name).is_file():
                    shutil.copyfile(adapter_dir / file_name, directory / file_name)


def _without_head(
    adapter_dir: Path, config: dict[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The adapters' tensors, and those of modules that were trained whole."""
    modules = config.get("modules_to_save") or []
    head = {name: tensor for name, tensor in tensors.items() if linear_of(name) is None}
    odd = [name for name in head if not set(modules) & set(name.split("."))]
    if modules and (odd or not head or config.get("task_type") != "SEQ_CLS"):
        raise BadInput(
            f"{adapter_dir} cannot be merged: of its modules_to_save only those of a head of whole sequences"
            f" (task_type SEQ_CLS) are supported{f', not {odd[0]}' if odd else ''}."
        )
    if not modules:
        return tensors, {}
    return {name: tensor for name, tensor in tensors.items() if name not in head}, head


def _say_what_it_tells(adapter_dir: Path, directory: Path, head: dict[str, Tensor], decoder: Decoder) -> None:
    job = adapter_dir / JOB_FILE
    content = yaml.safe_load(job.read_text(encoding="utf-8")) if job.is_file() else None
    kind, labels = kind_in_job(content if isinstance(content, dict) else {})
    names = decoder.names.classifier
    size = 0 if names is None else len(head.get(f"{names.out}.weight", ()))
    if not size:
        raise BadInput(f"{adapter_dir} cannot be merged: it brings no head that this family of models has.")
    write_sequence_config(directory, kind if size == 1 else "classes", labels, size)


def _check_supported(adapter_dir: Path, config: dict[str, Any]) -> None:
    odd = [field for field in _UNSUPPORTED if config.get(field)]
    if config.get("bias", "none") != "none":
        odd.append("bias")
    if odd:
        raise BadInput(f"{adapter_dir} cannot be merged: its {CONFIG_FILE} uses {', '.join(odd)}.")


def _without_copies(adapter_dir: Path, base: Checkpoint, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the base's own embedding or head, which peft saves along when it is adapted."""
    for name, tensor in tensors.items():
        original = name.replace(".base_layer.", ".")
        if original != name and original in base.names:
            stored = base.read(original)
            if stored.shape != tensor.shape or not torch.equal(stored, tensor.to(stored.dtype)):
                raise BadInput(f"{adapter_dir} cannot be merged: it brings a {original} other than the base's.")
    return {name: tensor for name, tensor in tensors.items() if ".base_layer." not in name}


def _shapes(base: Checkpoint, inputs_first: bool) -> dict[str, tuple[int, int]]:
    """``(outputs, inputs)`` of each linear of the base, by its name."""
    shapes = {name.removesuffix(".weight"): base.shape(name) for name in base.names if name.endswith(".weight")}
    matrices = {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
    return {name: (b, a) for name, (a, b) in matrices.items()} if inputs_first else matrices


def _stored_once(base_dir: Path, base: Checkpoint) -> list[str]:
    """The names to write: without the head where the model has none of its own but the file repeats it."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(base_dir, local_files_only=True).get_text_config()
    names = names_of(config)
    embedding, head = f"{names.embedding}.weight", f"{names.head}.weight"
    if embedding in base.names and head in base.names and config.tie_word_embeddings:
        return [name for name in base.names if name != head]
    return [*base.names]


def _check_fit(
    adapter_dir: Path, base: Checkpoint, names: list[str], changes: dict[str, Change], inputs_first: bool
) -> None:
    for linear, change in changes.items():
        name = f"{linear}.weight"
        if name not in names:
            raise BadInput(
                f"{adapter_dir} does not fit {base.directory}: it adapts {linear}, "
                "which has no weight of its own there."
            )
        stored = base.shape(name)
        if (stored[::-1] if inputs_first else stored) != change.shape_OI or not change.fits_itself:
            raise BadInput(f"{adapter_dir} does not fit {base.directory}: {name} has shape {stored}, {change.told()}.")


def _check_whole(adapter_dir: Path, config: dict[str, Any], changes: dict[str, Change], description: Decoder) -> None:
    lacking = [name for name in named_by(config, description) if name not in changes]
    if lacking:
        more = f", nor for {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
        raise BadInput(
            f"{adapter_dir} cannot be merged: its {CONFIG_FILE} names {lacking[0]}, but it has no tensors for it{more}:"
            " copy the adapter again."
        )


def _merged(name: str, whole: Tensor, changes: dict[str, Change], inputs_first: bool) -> Tensor:
    linear, _, part = name.rpartition(".")
    change = changes.get(linear)
    if change is None:
        return whole
    if part == "bias":
        return change.bias(whole)
    return change.weight(whole.T).T if inputs_first else change.weight(whole)
