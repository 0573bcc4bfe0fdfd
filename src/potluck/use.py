"""Using a result: answer prompts with it, score it, and read what it was made from."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from potluck.classify import classify_texts, has_classifier, score_classifier
from potluck.errors import BadInput
from potluck.job import JOB_FILE, load_job
from potluck.job_sections import Data, Format, Task
from potluck.models.adapter import TEMPLATE_FILE
from potluck.models.evaluate import Scores, evaluate
from potluck.models.evaluate_classes import ClassScores
from potluck.models.families import decoder_of, for_task, known, read_config
from potluck.models.generate import generate_text
from potluck.models.inference import load_for_inference
from potluck.models.merge import merge
from potluck.models.precision import choose_dtype, torch_dtype
from potluck.models.reading import reads_of, tells_texts_apart
from potluck.models.source import resolve
from potluck.texts.batch import Example
from potluck.texts.encode import encode_prompt, stop_ids
from potluck.texts.labelled import Labelled
from potluck.texts.task_rows import TaskRow, encode_for_task, read_for
from potluck.texts.tokenizer import load_tokenizer
from potluck.texts.vocabulary import check_vocabulary

_BATCH_SIZE = 32


@dataclass(frozen=True)
class Trained:
    """A result on disk."""

    base: Path
    """The model it was made from, as a Hugging Face directory; the result itself if it is a plain checkpoint."""
    adapter: Path | None
    """The adapter; None if the result is a plain checkpoint."""
    data: Data
    """How its prompts were written; the columns and the classes of a classifier."""
    task: Task
    dtype: str | None = None
    """What it was trained in, where that is known."""

    def inference_dtype(self) -> torch.dtype:
        """Float32 or better if it was trained so; else what this machine runs fastest."""
        if self.dtype in ("fp32", "fp64"):
            return torch_dtype(self.dtype)
        return inference_dtype(self.base)


def open_result(directory: Path) -> Trained:
    """Find out what a result consists of.

    Raises:
        BadInput: there is neither an adapter nor a checkpoint, or its base model cannot be found.
    """
    if not directory.is_dir():
        raise BadInput(f"There is no directory {directory}; expected the output of 'potluck tune'.")
    data, task, dtype = _as_trained(directory)
    adapter_config = directory / "adapter_config.json"
    if adapter_config.exists():
        own_template = directory / TEMPLATE_FILE
        if data.template not in ("auto", "chatml") and own_template.is_file():
            data = data.model_copy(update={"template": str(own_template)})  # what it was copied from may be gone
        return Trained(base=resolve(_base_of(adapter_config)), adapter=directory, data=data, task=task, dtype=dtype)
    if (directory / "config.json").exists():
        return Trained(base=directory, adapter=None, data=data, task=task, dtype=dtype)
    raise BadInput(f"{directory} holds neither an adapter (adapter_config.json) nor a model (config.json).")


def _as_trained(directory: Path) -> tuple[Data, Task, str | None]:
    """How a result's texts were written, its task and dtype: by the job beside it, or else by its configuration."""
    if (job_file := directory / JOB_FILE).exists():
        job = load_job(job_file)
        return job.data, job.task, job.dtype
    if not (directory / "adapter_config.json").exists():
        config = _json_of(directory / "config.json")
        if any(str(name).endswith("ForSequenceClassification") for name in config.get("architectures") or ()):
            names = read_config(directory).id2label or {}
            if len(names) > 1:
                return Data(train=["-"], labels=[str(name) for name in names.values()]), "sequence-classification", None
            return Data(train=["-"]), "sequence-regression", None
    return Data(train=["-"], format="prompt"), "causal-lm", None


def _json_of(file: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _base_of(adapter_config: Path) -> str:
    base = _json_of(adapter_config).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise BadInput(f"{adapter_config} does not name its base model ('base_model_name_or_path').")
    return base


def generate(
    directory: Path | str,
    prompts: Sequence[str],
    *,
    pairs: Sequence[str] | None = None,
    max_new_tokens: int = 128,
    format: Format = "auto",
) -> list[str]:
    """Answer prompts with a result; the most likely token each time, or the most likely class (or the value).

    Args:
        directory: an adapter or a checkpoint, as ``tune`` leaves it.
        prompts: each is one user message where the training data were chats, else the text to go on from, or to
            classify.
        pairs: for each prompt the second text, where pairs are classified.
        max_new_tokens: the longest answer.
        format: how the training data were written; ``auto`` is what the job beside the result says.

    Raises:
        BadInput: the result or its base model cannot be used, or the format is not known.
        TypeError: ``prompts`` is one string.
        ValueError: ``pairs`` are not as many as ``prompts``.
    """
    if isinstance(prompts, str) or isinstance(pairs, str):
        raise TypeError("prompts is one string; give a list of prompts")
    if pairs is not None and len(pairs) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(pairs)} second texts")
    trained = open_result(Path(directory))
    dtype = trained.inference_dtype()
    if trained.task != "causal-lm":
        return classify_texts(trained.base, trained.adapter, trained.data, prompts, pairs, dtype)
    if pairs is not None:
        raise BadInput(f"{directory} goes on from one text; a second one (--pair) is for what was trained on pairs.")
    data = trained.data if format == "auto" else trained.data.model_copy(update={"format": format})
    return answer(trained.base, trained.adapter, data, prompts, max_new_tokens=max_new_tokens, dtype=dtype)


def answer(
    model_dir: Path,
    adapter: Path | None,
    data: Data,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 128,
    dtype: torch.dtype | None = None,
) -> list[str]:
    """Answer prompts with a model and, if given, an adapter; prompts are encoded as ``data`` says.

    ``dtype`` None is what this machine runs fastest.

    Raises:
        BadInput: the model says no tokens, it or the adapter cannot be used, or the format of the data is not known.
    """
    _check_says_tokens(model_dir)
    tokenizer = load_tokenizer(model_dir)
    encoded = [encode_prompt(prompt, tokenizer, data, data.format) for prompt in prompts]
    model = load_for_inference(model_dir, adapter, dtype or inference_dtype(model_dir))
    stops = stop_ids(tokenizer, data, data.format)
    return [generate_text(model, tokenizer, ids, max_new_tokens, stops) for ids in encoded]


def evaluate_result(
    directory: Path | str, data: Sequence[str], *, progress: Callable[[int, int], None] | None = None
) -> tuple[Scores | None, Scores] | tuple[ClassScores | None, ClassScores]:
    """Score a result on examples, and what it was made from: ``(before, after)``.

    ``before`` is None for a plain checkpoint, whose origin is not part of it, and for a classifier whose base model
    had no head yet.

    Raises:
        BadInput: the result or the data cannot be used.
        TypeError: ``data`` is one string.
    """
    if isinstance(data, str):
        raise TypeError("data is one string; give a list of sources")
    trained = open_result(Path(directory))
    if trained.task == "causal-lm":
        _check_says_tokens(trained.base)
    written = trained.data.model_copy(update={"format": "auto"})
    examples = encode_for(trained.base, read_for(trained.task, data, written, others=True), trained.data)
    dtype = trained.inference_dtype()
    if trained.task == "causal-lm":
        after = score(trained.base, trained.adapter, examples, dtype, progress=progress)
        return score(trained.base, None, examples, dtype, progress=progress) if trained.adapter else None, after
    judged = score_classifier(trained.base, trained.adapter, examples, dtype, trained.data, progress=progress)
    if trained.adapter is None or not has_classifier(trained.base):
        return None, judged
    return score_classifier(trained.base, None, examples, dtype, trained.data, progress=progress), judged


def _check_says_tokens(model_dir: Path) -> None:
    """See that a model goes on from a text, as far as potluck knows its family."""
    decoder = known(read_config(model_dir))
    if decoder is not None:
        for_task(decoder, None)


def merge_result(directory: Path | str, output: Path | str, *, overwrite: bool = False) -> None:
    """Write an adapter and its base model as one plain checkpoint.

    Raises:
        BadInput: there is no adapter, its base model cannot be found, or ``output`` is not empty.
        SaveFailed: the checkpoint could not be written; what stood there before is untouched.
    """
    trained = open_result(Path(directory))
    if trained.adapter is None:
        raise BadInput(f"{directory} is a plain checkpoint already: there is no adapter to merge.")
    merge(trained.adapter, trained.base, Path(output), overwrite, along=[JOB_FILE])  # how prompts are written


def score(
    model_dir: Path,
    adapter: Path | None,
    examples: Sequence[Example],
    dtype: torch.dtype,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Loss and exact-match accuracy of a model, with an adapter if given, both read from disk."""
    model = load_for_inference(model_dir, adapter, dtype)
    return evaluate(
        model,
        load_tokenizer(model_dir),
        examples,
        batch_size=_BATCH_SIZE,
        generate=any(example.answer is not None for example in examples),
        progress=progress,
    )


def encode_for(model_dir: Path, rows: Sequence[TaskRow], data: Data) -> list[Example]:
    """Rows as examples for a model, cut to the positions it has.

    Raises:
        BadInput: no example is left, one holds a token that the model does not have, or a label is none of those that
            ``data`` names.
    """
    config = read_config(model_dir)
    decoder = known(config)
    if decoder is not None:
        data = data.model_copy(update={"max_length": min(data.max_length, decoder.max_positions)})
    if any(isinstance(row, Labelled) for row in rows):
        reads_as = decoder or decoder_of(config)  # which says why there is none
        reads, types = reads_of(reads_as), tells_texts_apart(reads_as)
    else:
        reads, types = "last", False
    examples = encode_for_task(rows, load_tokenizer(model_dir), data, reads=reads, types=types).examples
    check_vocabulary(examples, int(config.get_text_config().vocab_size))
    return examples


def inference_dtype(model_dir: Path) -> torch.dtype:
    """The dtype in which this machine runs the model fastest."""
    config = read_config(model_dir).get_text_config()
    columns = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return torch_dtype(choose_dtype("auto", config.hidden_size, columns))
