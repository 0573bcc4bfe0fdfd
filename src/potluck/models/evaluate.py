"""How good a model is on held-out examples, and what it says: stock transformers and peft, nothing of our own chain.

The result of a training is judged by what everybody else would load, so this shares no code with what trained it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from potluck.errors import BadInput
from potluck.models.generate import continuations, ends_of_answers, inner_model, positions_of, stop_ids
from potluck.texts.batch import Example

_LOGIT_BYTES = 64 << 20  # logits held at once
_SPARE_TOKENS = 4  # beyond the longest answer: a wrong one may go on


@dataclass(frozen=True)
class Scores:
    """What an evaluation found."""

    loss: float
    """Cross-entropy in nats, summed over target tokens and divided by their number."""
    perplexity: float
    """``exp(loss)``."""
    accuracy: float | None
    """Part of the answers that greedy generation says exactly; None if no example has an answer, or not asked for."""
    examples: int
    target_tokens: int


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    batch_size: int,
    generate: bool,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Loss over all target tokens; with ``generate``, how many answers greedy generation says exactly.

    Args:
        model: what :func:`potluck.models.inference.load_for_inference` returned.
        tokenizer: the one that made the examples.
        examples: their answers are compared after ``strip()``.
        batch_size: rows computed at once.
        generate: whether to measure the accuracy.
        progress: called with the examples done and the examples to do, those to generate counted again.

    Raises:
        BadInput: no example has a target.
    """
    answered = [example for example in examples if example.answer is not None] if generate else []
    total = len(examples) + len(answered)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    loss, targets = 0.0, 0
    for batch in by_length(examples, batch_size, lambda example: len(example.ids)):
        batch_loss, batch_targets = _loss_sum(model, batch)
        loss, targets = loss + batch_loss, targets + batch_targets
        advance(len(batch))
    if targets == 0:
        raise BadInput("There is nothing to evaluate: no example has a target token.")
    correct = 0
    stops = stop_ids(model, tokenizer) | ends_of_answers(tokenizer, answered)
    for batch in by_length(answered, batch_size, lambda example: example.prompt_length):
        for some, most in _to_say(batch, tokenizer, positions_of(model)):
            answers = [(example.answer or "").strip() for example in some]
            prompts = [example.ids[: example.prompt_length] for example in some]
            said = continuations(model, tokenizer, prompts, most, stops, answers)
            correct += sum(text.strip() == answer for text, answer in zip(said, answers, strict=True))
            advance(len(some))
    mean = loss / targets
    return Scores(
        loss=mean,
        perplexity=math.exp(mean) if mean < 700 else math.inf,
        accuracy=correct / len(answered) if answered else None,
        examples=len(examples),
        target_tokens=targets,
    )


def _to_say(
    batch: Sequence[Example], tokenizer: PreTrainedTokenizerBase, positions: int | None
) -> Iterator[tuple[Sequence[Example], int]]:
    """The batch, and how many tokens its longest answer may have; one by one where together they need more positions
    than the model has."""
    again = [len(tokenizer.encode((each.answer or "").strip(), add_special_tokens=False)) for each in batch]
    needed = [max(n, len(each.ids) - each.prompt_length) for n, each in zip(again, batch, strict=True)]
    most = max(needed) + _SPARE_TOKENS
    if positions is None or max(each.prompt_length for each in batch) + most <= positions:
        yield batch, most
        return
    for each, tokens in zip(batch, needed, strict=True):
        yield [each], max(1, min(tokens + _SPARE_TOKENS, positions - each.prompt_length))


def by_length(examples: Sequence[Example], size: int, length: Callable[[Example], int]) -> Iterator[Sequence[Example]]:
    """Batches of ``size``: similar lengths together, longest first, so that running out of memory shows at once."""
    ordered = sorted(examples, key=length, reverse=True)
    return (ordered[at : at + size] for at in range(0, len(ordered), size))


@torch.inference_mode()
def _loss_sum(model: PreTrainedModel, batch: Sequence[Example]) -> tuple[float, int]:
    """Summed cross-entropy of a batch and its target tokens; logits at supervised positions only."""
    longest = max(len(example.ids) for example in batch)
    ids_BS = torch.tensor([[*example.ids, *[0] * (longest - len(example.ids))] for example in batch])
    mask_BS = torch.tensor([[1] * len(example.ids) + [0] * (longest - len(example.ids)) for example in batch])
    is_target_BS = torch.tensor(
        [[*example.supervised, *[False] * (longest - len(example.ids))] for example in batch], dtype=torch.bool
    )
    targets_N = ids_BS[:, 1:][is_target_BS[:, 1:]]
    if len(targets_N) == 0:
        return 0.0, 0
    base = inner_model(model)
    hidden_BSD = base.base_model(input_ids=ids_BS, attention_mask=mask_BS, use_cache=False).last_hidden_state
    hidden_ND = hidden_BSD[:, :-1][is_target_BS[:, 1:]]
    rows = max(1, _LOGIT_BYTES // (4 * base.config.get_text_config().vocab_size))
    loss = 0.0
    for h_ND, t_N in zip(torch.split(hidden_ND, rows), torch.split(targets_N, rows), strict=True):
        loss += cross_entropy(_logits(base, h_ND).float(), t_N, reduction="sum").item()
    return loss, len(targets_N)


def _logits(base: Any, hidden_ND: Tensor) -> Tensor:
    """The head as the families' own forward applies it."""
    config = base.config.get_text_config()
    logits_NV: Tensor = base.get_output_embeddings()(hidden_ND)
    if (scaling := getattr(config, "logits_scaling", None)) is not None:
        logits_NV = logits_NV / scaling
    if (scale := getattr(config, "logit_scale", None)) is not None:
        logits_NV = logits_NV * scale
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits_NV = torch.tanh(logits_NV / cap) * cap
    return logits_NV
