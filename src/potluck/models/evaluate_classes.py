"""How good a classifier is on held-out examples, and what it says of a text: stock transformers and peft alone.

Scores are those of GLUE (Wang et al., 2018), taken from scikit-learn and SciPy as its reference code does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from transformers import PreTrainedModel

from potluck.errors import BadInput
from potluck.models.evaluate import by_length
from potluck.models.generate import inner_model
from potluck.texts.batch import Example


@dataclass(frozen=True)
class ClassScores:
    """What an evaluation of a classifier found; what its task does not have is None."""

    loss: float
    """Mean over the examples: cross-entropy in nats of classes, squared error of values."""
    accuracy: float | None
    """Part of the examples whose most likely class is theirs."""
    f1: float | None
    """Of two classes, the F1 of the second; of more, the mean of all that occur."""
    matthews: float | None
    """Matthews correlation of classes, -1 to 1; 0 where all examples get the same class."""
    pearson: float | None
    """Correlation of values, -1 to 1; None too where all values are the same."""
    spearman: float | None
    """Correlation of the ranks of values; None too where all values are the same."""
    examples: int


def evaluate_classes(
    model: PreTrainedModel,
    examples: Sequence[Example],
    *,
    classes: int,
    batch_size: int,
    progress: Callable[[int, int], None] | None = None,
) -> ClassScores:
    """Score a classifier on labelled examples.

    Args:
        model: what :func:`potluck.models.inference.load_classifier` returned.
        examples: with labels.
        classes: how many there are; 0 for values.
        batch_size: rows computed at once.
        progress: called with the examples done and the examples to do.

    Raises:
        BadInput: there is no example.
    """
    if not examples:
        raise BadInput("There is nothing to evaluate: no example.")
    labels: list[float] = []
    outputs: list[Tensor] = []
    for batch in by_length(examples, batch_size, lambda example: len(example.ids)):
        outputs.append(logits_of(model, batch))
        labels += [_label(example) for example in batch]
        if progress is not None:
            progress(len(labels), len(examples))
    logits_NC = torch.cat(outputs)
    return _of_classes(logits_NC, torch.tensor(labels)) if classes else _of_values(logits_NC[:, 0], labels)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, batch: Sequence[Example]) -> Tensor:
    """What a classifier gives for each example, ``[B, C]`` in float32; labels are not looked at."""
    longest = max(len(example.ids) for example in batch)
    lasts, config = {example.ids[-1] for example in batch}, inner_model(model).config.get_text_config()
    if len(lasts) == config.vocab_size:  # every token ends some text, so that none is left to pad with
        return torch.cat([logits_of(model, [example]) for example in batch])
    with _padding_other_than(config, lasts) as pad:
        fields = {
            "input_ids": _padded([example.ids for example in batch], longest, pad),
            "attention_mask": _padded([(1,) * len(example.ids) for example in batch], longest, 0),
        }
        if any(example.types for example in batch):
            types = [example.types or (0,) * len(example.ids) for example in batch]
            fields["token_type_ids"] = _padded(types, longest, 0)
        logits_BC: Tensor = model(**fields).logits.float()
    return logits_BC


def _of_classes(logits_NC: Tensor, labels_N: Tensor) -> ClassScores:
    from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

    right, said = labels_N.long().numpy(), logits_NC.argmax(-1).numpy()
    average = "binary" if logits_NC.shape[1] == 2 else "macro"
    return ClassScores(
        loss=cross_entropy(logits_NC.double(), labels_N.long()).item(),
        accuracy=float(accuracy_score(right, said)),
        f1=float(f1_score(right, said, average=average, zero_division=0)),
        matthews=float(matthews_corrcoef(right, said)),
        pearson=None,
        spearman=None,
        examples=len(right),
    )


def _of_values(said_N: Tensor, labels: Sequence[float]) -> ClassScores:
    from scipy.stats import pearsonr, spearmanr

    right_N, said_N = torch.tensor(labels, dtype=torch.float64), said_N.double()
    defined = len(labels) > 1 and all(len(values.unique()) > 1 for values in (right_N, said_N))
    return ClassScores(
        loss=mse_loss(said_N, right_N).item(),
        accuracy=None,
        f1=None,
        matthews=None,
        pearson=float(pearsonr(right_N.numpy(), said_N.numpy()).statistic) if defined else None,
        spearman=float(spearmanr(right_N.numpy(), said_N.numpy()).statistic) if defined else None,
        examples=len(labels),
    )


def _label(example: Example) -> float:
    assert example.label is not None
    return example.label


@contextmanager
def _padding_other_than(config: Any, lasts: set[int]) -> Iterator[int]:
    """A padding id that ends no text, for the length of a block.

    transformers takes for a decoder's last token the last one that is not padding, and the padding id of many models
    is also their end of text; some name none, and then walk one text at a time only.
    """
    kept = config.pad_token_id
    free = (i for i in (kept, *range(config.vocab_size)) if i is not None and 0 <= i < config.vocab_size)
    config.pad_token_id = pad = next(i for i in free if i not in lasts)
    try:
        yield pad
    finally:
        config.pad_token_id = kept


def _padded(rows: Sequence[Sequence[int]], longest: int, value: int) -> Tensor:
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])
