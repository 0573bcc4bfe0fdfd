"""What a model says: greedy generation with stock transformers, in padded batches, quick on few cores."""

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.utils import logging

from potluck.errors import BadInput
from potluck.texts.batch import Example


def generate_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: Sequence[int],
    max_new_tokens: int,
    stops: Iterable[int] = (),
) -> str:
    """What the model says after the prompt ``ids``, greedily, up to the end of its turn; without special tokens.

    ``stops`` end it too: what ended the answers it was trained on.

    Raises:
        BadInput: the model has no position left behind the prompt.
    """
    if (positions := positions_of(model)) is not None:
        if len(ids) >= positions:
            raise BadInput(
                f"The prompt has {len(ids):,} tokens, and the model has {positions:,} positions, of which an answer"
                " needs one, too: shorten the prompt."
            )
        max_new_tokens = min(max_new_tokens, positions - len(ids))
    return continuations(model, tokenizer, [ids], max_new_tokens, stop_ids(model, tokenizer) | set(stops))[0]


@torch.inference_mode()
def continuations(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stops: set[int],
    answers: Sequence[str] | None = None,
) -> list[str]:
    """What the model says after each prompt, greedily, without what ends it; prompts padded on the left.

    Args:
        model: a transformers model, or a PeftModel around one.
        tokenizer: the model's.
        prompts: token ids.
        max_new_tokens: the most a row may get.
        stops: tokens that end a row (see :func:`stop_ids`).
        answers: one for each prompt; a row then also ends where it can no longer become its answer.
    """
    longest = max(len(prompt) for prompt in prompts)
    pad = min(stops, default=0)
    ids_BS = torch.tensor([[pad] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask_BS = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=sorted(stops) or None, pad_token_id=pad
    )
    criteria = StoppingCriteriaList([] if answers is None else [_Astray(tokenizer, longest, answers)])
    inner = inner_model(model)  # a PeftModel's own generate would put the replaced settings back
    with quiet(), _greedy(inner):
        said_BT = inner.generate(
            input_ids=ids_BS, attention_mask=mask_BS, generation_config=settings, stopping_criteria=criteria
        )
    return [_text(tokenizer, row, stops) for row in said_BT[:, longest:].tolist()]


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int], stops: set[int]) -> str:
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return str(tokenizer.decode(ids[:end], skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Astray(StoppingCriteria):
    """Ends the rows whose text so far does not begin their answer: most, as long as the model is untrained."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, answers: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._prompt_length = prompt_length
        self._answers = answers

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        rows = input_ids[:, self._prompt_length :].tolist()
        texts = [_text(self._tokenizer, row, set()).rstrip("\N{REPLACEMENT CHARACTER}").strip() for row in rows]
        return torch.tensor([not a.startswith(t) for a, t in zip(self._answers, texts, strict=True)])


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """What ends an answer: the tokenizer's and the model's end of text, the chat template's end of turn."""
    stops: set[int] = set()
    for known in (tokenizer.eos_token_id, inner_model(model).generation_config.eos_token_id):
        stops.update([known] if isinstance(known, int) else known or [])
    if tokenizer.chat_template is not None:
        turns = [{"role": "user", "content": "potluck"}, {"role": "assistant", "content": "potluck"}]
        try:
            text = str(tokenizer.apply_chat_template(turns, tokenize=False))
        except (TemplateError, ValueError, TypeError):
            return stops  # a template for other turns than these
        after = tokenizer.encode(text.rpartition("potluck")[2], add_special_tokens=False)
        stops.update([token for token in after if token in _specials(tokenizer)][:1])
    return stops


def ends_of_answers(tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example]) -> set[int]:
    """Special tokens the examples end their answers with: a template of the job's own has its own.

    Whitespace may follow; specials inside an answer, as around a thought or a tool call, do not end it.
    """
    specials, ends = _specials(tokenizer), set()
    for example in examples:
        for i in range(len(example.ids) - 1, example.prompt_length - 1, -1):
            if example.ids[i] in specials:
                ends.add(example.ids[i])
                break
            if str(tokenizer.decode([example.ids[i]])).strip():
                break
    return ends


def _specials(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added = {token for token, entry in tokenizer.added_tokens_decoder.items() if entry.special}
    return added | set(tokenizer.all_special_ids)


@contextmanager
def _greedy(model: Any) -> Iterator[None]:
    """Greedy means greedy, and quick: for the length of a block.

    Settings for sampling that came with the model would be merged in, with warnings. The head's input is the last
    position of each row, a strided slice, for which torch multiplies by a copy of the whole head for each row.
    """
    kept = model.generation_config
    model.generation_config = GenerationConfig()  # type: ignore[no-untyped-call]
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: (inputs[0].contiguous(),))
    try:
        yield
    finally:
        hook.remove()
        model.generation_config = kept


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' bars and warnings, for the length of a block."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def positions_of(model: Any) -> int | None:
    """Tokens that the model can read at once; None where its config does not say."""
    positions: int | None = getattr(inner_model(model).config.get_text_config(), "max_position_embeddings", None)
    return positions


def inner_model(model: Any) -> Any:
    """The transformers model inside a PeftModel, adapters included."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
