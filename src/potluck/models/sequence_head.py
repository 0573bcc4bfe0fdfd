"""The head of whole sequences on disk: read or drawn, and saved so that stock transformers and peft load it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from potluck.chain.classifier import Classifier, Kind
from potluck.job_sections import IA3, Adapter
from potluck.models.cutting import Cutter
from potluck.models.families.decoder import ClassifierNames, Decoder, SequenceHead
from potluck.models.targets import names_apart


def build_classifier(cutter: Cutter, decoder: Decoder, sequence: SequenceHead) -> Classifier:
    """The head as every device has it.

    It is trained whole, but for a layer that belongs to the base model: beside adapters that one stays as it is, unless
    the checkpoint lacks it, so that nobody who loads the result could know it.

    Raises:
        BadInput: the checkpoint has a head for another number of classes.
    """
    names, D = _names(decoder), decoder.hidden_size
    spread, hidden = decoder.initializer_range, None
    if names.hidden is not None:
        trained = (
            trains_hidden(decoder, full=cutter.adapter is None)
            or f"{names.hidden}.weight" not in cutter.checkpoint.names
        )
        hidden = (
            cutter.of_head(f"{names.hidden}.weight", (D, D), spread=spread, trained=trained),
            cutter.of_head(f"{names.hidden}.bias", (D,), spread=0.0, trained=trained),
        )
    weight_CD = cutter.of_head(f"{names.out}.weight", (sequence.size, D), spread=spread, trained=True)
    bias_C = None
    if names.biased:
        bias_C = cutter.of_head(f"{names.out}.bias", (sequence.size,), spread=0.0, trained=True)
    return Classifier(sequence.kind, (weight_CD, bias_C), hidden)


def trains_hidden(decoder: Decoder, *, full: bool) -> bool:
    """Whether the head has a layer before its last that is trained, of a checkpoint that lacks none."""
    names = _names(decoder)
    return names.hidden is not None and (full or not names.hidden_of_base)


def adapter_targets(adapter: Adapter, adapted: Iterable[str], decoder: Decoder) -> tuple[list[str], list[str]]:
    """The names by which peft finds the linears ``adapted``, and no other; of (IA)^3, those of scaled inputs again.

    Args:
        adapter: as the job has it; ``all-linear`` among its targets is written as last parts of names.
        adapted: full names of the linears that have adapters.
        decoder: the model's description. Where its head's layers are called as linears of blocks are (``dense``), more
            parts of the names are written.
    """
    linears = sorted(adapted)
    if isinstance(adapter, IA3):
        of_outputs, of_inputs = names_apart(linears, decoder)
        return sorted({*of_outputs, *of_inputs}), of_inputs
    targets = list(adapter.targets)
    if "all-linear" in targets:
        targets = sorted({name.rsplit(".", 1)[-1] for name in linears})
    classifier = decoder.names.classifier
    hidden = None if classifier is None else classifier.hidden
    if hidden is None:
        return targets, []
    written: list[str] = []
    for target in targets:
        if f".{hidden}".endswith(f".{target}"):
            written += {decoder.within_block(name) for name in linears if name.endswith(f".{target}")}
        else:
            written.append(target)
    return sorted(set(written)), []


def modules_to_save(names: Iterable[str], decoder: Decoder) -> list[str]:
    """The modules that hold these tensors of the head, as peft names them."""
    base = base_prefix(decoder)
    parts = [name.removeprefix(base).split(".") for name in names]
    return sorted({first for first, *_ in parts})


def base_prefix(decoder: Decoder) -> str:
    """What the names of all tensors but those of heads begin with."""
    return decoder.names.embedding.split(".")[0] + "."


def is_of_base(name: str, decoder: Decoder) -> bool:
    """Whether a checkpoint's tensor is one that transformers' model with a head of whole sequences has."""
    hidden = _names(decoder).hidden
    is_pooler = ".pooler." in name and not (hidden is not None and name.startswith(hidden))
    return name.startswith(base_prefix(decoder)) and not name.endswith(".position_ids") and not is_pooler


def write_sequence_config(directory: Path, kind: Kind, labels: Sequence[str], size: int) -> None:
    """Have a model's ``config.json`` say that it tells of whole sequences, and what.

    Args:
        directory: holds the base model's config.json, which is changed.
        kind: classes or a value.
        labels: names of the classes, in the order of their indices; numbered if there are none.
        size: outputs of the head.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES

    path = directory / "config.json"
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    names = list(labels) if len(labels) == size else [f"LABEL_{i}" for i in range(size)]
    config |= {
        "architectures": [CLASSES[config["model_type"]]],
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        "num_labels": size,
        "problem_type": "regression" if kind == "value" else "single_label_classification",
    }
    if config.get("pad_token_id") is None and (end := _first(config.get("eos_token_id"))) is not None:
        config["pad_token_id"] = end  # stock models need one to find the last token of a row
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def kind_in_job(job: Mapping[str, Any]) -> tuple[Kind, list[str]]:
    """What a saved job's model tells: the kind of its head, and the names of its classes."""
    data = job.get("data")
    labels = data.get("labels") if isinstance(data, Mapping) else None
    kind: Kind = "value" if job.get("task") == "sequence-regression" else "classes"
    return kind, [str(name) for name in labels] if isinstance(labels, list) else []


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else value


def _names(decoder: Decoder) -> ClassifierNames:
    names = decoder.names.classifier
    assert names is not None, "families.for_task refuses families without one"
    return names
