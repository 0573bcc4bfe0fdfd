"""Models as everybody else loads them: with stock transformers, and their adapters with stock peft."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from potluck.errors import BadInput
from potluck.models.adapter import read_config, read_tensors
from potluck.models.families import for_task, known
from potluck.models.families import read_config as read_model_config
from potluck.models.families.decoder import SequenceHead
from potluck.models.generate import quiet
from potluck.models.shapes import check_model
from potluck.models.source import check_directory

_REGRESSION = "regression"
_CLASSIFICATION = "single_label_classification"
_PREFIX = "base_model.model."


def load_for_inference(model_dir: Path, adapter: Path | None, dtype: torch.dtype) -> PreTrainedModel:
    """A model that says what comes next, and its adapter (then a ``PeftModel``), in eval mode.

    Raises:
        BadInput: the model cannot be loaded, or the adapter is not wholly one of this model.
    """
    return _loaded(AutoModelForCausalLM, model_dir, adapter, dtype, {}, None)


def load_classifier(model_dir: Path, adapter: Path | None, dtype: torch.dtype, *, classes: int) -> PreTrainedModel:
    """A model that names the class of a text, with its head, in eval mode; the head may come with the adapter.

    Args:
        model_dir: the model; a head it does not have is drawn at random.
        adapter: what was trained of it.
        dtype: to compute in.
        classes: how many there are; 0 for a model that gives a value.

    Raises:
        BadInput: as :func:`load_for_inference`, or its head is for another number of classes.
    """
    head = SequenceHead("classes" if classes else "value", classes or 1)
    kind = {"num_labels": classes or 1, "problem_type": _CLASSIFICATION if classes else _REGRESSION}
    return _loaded(AutoModelForSequenceClassification, model_dir, adapter, dtype, kind, head)


def _loaded(
    auto: Any,
    model_dir: Path,
    adapter: Path | None,
    dtype: torch.dtype,
    kind: dict[str, Any],
    sequence: SequenceHead | None,
) -> PreTrainedModel:
    check_directory(model_dir)
    decoder = known(read_model_config(model_dir))
    if decoder is not None:  # transformers would draw what is missing at random
        check_model(model_dir, for_task(decoder, sequence))
    with quiet():
        try:
            model = auto.from_pretrained(model_dir, dtype=dtype, local_files_only=True, **kind)
        except (OSError, ValueError, KeyError, RuntimeError, AssertionError) as error:
            raise BadInput(f"{model_dir} cannot be loaded: {_one_line(error)}.") from error
        if adapter is not None:
            model = _with_adapter(model, adapter)
            # vectors hardly differ from one: in bfloat16 most of what they learned would be gone
            model = model if read_config(adapter)["peft_type"] == "IA3" else model.to(dtype)
    model.requires_grad_(False)
    evaluated: PreTrainedModel = model.eval()
    return evaluated


def _with_adapter(model: PreTrainedModel, adapter: Path) -> Any:
    from peft import PeftModel, get_peft_model_state_dict

    stored = read_tensors(adapter)
    try:
        adapted = PeftModel.from_pretrained(model, adapter)
    except KeyError as error:  # how peft says that a head is missing
        name = str(error.args[0]).removeprefix(_PREFIX)
        raise BadInput(f"{adapter} does not fit the model: it lacks {name}.") from error
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        raise BadInput(f"{adapter} does not fit the model: {_one_line(error)}.") from error
    trained = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    expected = {name.removeprefix(_PREFIX) for name in trained}
    odd = sorted(expected ^ {name for name in stored if ".base_layer." not in name})
    if odd:  # peft only warns of these
        what = "lacks" if odd[0] in expected else "holds, beyond what the model has,"
        raise BadInput(f"{adapter} does not fit the model: it {what} {odd[0]}.")
    return adapted


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:300]
