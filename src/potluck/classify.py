"""Using a result that classifies: the class or the value of a text, and scores on held-out examples."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig

from potluck.errors import BadInput
from potluck.job_sections import Data
from potluck.models.checkpoint import Checkpoint
from potluck.models.evaluate_classes import ClassScores, evaluate_classes, logits_of
from potluck.models.families import decoder_of, read_config
from potluck.models.inference import load_classifier
from potluck.models.reading import reads_of, tells_texts_apart
from potluck.texts.batch import Example
from potluck.texts.encode_labelled import encode_texts
from potluck.texts.tokenizer import load_tokenizer
from potluck.texts.vocabulary import check_vocabulary

_BATCH_SIZE = 32
_HEADS = {"score", "classifier"}  # what transformers calls the heads of all families


def has_classifier(model_dir: Path) -> bool:
    """Whether a checkpoint brings a classifier's head; weights are not read."""
    with Checkpoint.open(model_dir) as checkpoint:
        return any(_HEADS.intersection(name.split(".")) for name in checkpoint.names)


def in_order_of(config: PretrainedConfig, data: Data) -> Data:
    """The data section with its classes in the order in which the model's own head has them, if it has the same."""
    known = list((config.id2label or {}).values())
    return data.model_copy(update={"labels": known}) if sorted(known) == sorted(data.labels) else data


def score_classifier(
    model_dir: Path,
    adapter: Path | None,
    examples: Sequence[Example],
    dtype: torch.dtype,
    data: Data,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ClassScores:
    """Loss and scores of a classifier, with an adapter if given, both read from disk; ``data`` names the classes.

    Raises:
        BadInput: the model or the adapter cannot be used, or there is no example.
    """
    classes = len(data.labels)
    model = load_classifier(model_dir, adapter, _dtype_for(data, dtype), classes=classes)
    return evaluate_classes(model, examples, classes=classes, batch_size=_BATCH_SIZE, progress=progress)


def classify_texts(
    model_dir: Path,
    adapter: Path | None,
    data: Data,
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    dtype: torch.dtype,
) -> list[str]:
    """The most likely class of each text or pair of texts, by its name; the value, as text, where there are no classes.

    Args:
        model_dir: the model.
        adapter: what was trained of it.
        data: of the training job.
        texts: what to classify.
        pairs: the second texts, where training had them.
        dtype: to compute in.

    Raises:
        BadInput: the model cannot be used, a text has no token, or it takes pairs and there are none, or the reverse.
    """
    if data.text_pair is not None and pairs is None:
        raise BadInput(
            f"This model was trained on pairs of texts ('{data.text}', '{data.text_pair}'): give the second one, too "
            "(--pair)."
        )
    if data.text is not None and data.text_pair is None and pairs is not None:
        raise BadInput(f"This model was trained on single texts ('{data.text}'): leave out the second one (--pair).")
    decoder = decoder_of(read_config(model_dir))
    data = data.model_copy(update={"max_length": min(data.max_length, decoder.max_positions)})
    examples, _ = encode_texts(
        texts,
        pairs,
        [f"text {number}" for number in range(1, len(texts) + 1)],
        load_tokenizer(model_dir),
        data,
        reads=reads_of(decoder),
        types=tells_texts_apart(decoder),
    )
    check_vocabulary(examples, decoder.vocab_size)
    model = load_classifier(model_dir, adapter, _dtype_for(data, dtype), classes=len(data.labels))
    said: list[str] = []
    for start in range(0, len(examples), _BATCH_SIZE):
        logits_BC = logits_of(model, examples[start : start + _BATCH_SIZE])
        if data.labels:
            said += [data.labels[index] for index in logits_BC.argmax(-1).tolist()]
        else:
            said += [f"{value:.6g}" for value in logits_BC[:, 0].tolist()]
    return said


def _dtype_for(data: Data, dtype: torch.dtype) -> torch.dtype:
    """Values are told with more digits than bfloat16 has; a class is the same for all that."""
    return dtype if data.labels else torch.promote_types(dtype, torch.float32)
