"""What split training leaves: an adapter of the whole model in PEFT's format, and how good it is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from potluck.job import JOB_FILE, METRICS_FILE, Job, dump_job
from potluck.job_sections import Split
from potluck.models.adapter import adapter_config, linear_of, write_adapter
from potluck.models.families.decoder import Decoder
from potluck.split.candidates import Candidates
from potluck.split.quality import Quality
from potluck.split.settings import own_template
from potluck.split.terms import QUALITY_FILE


@dataclass(frozen=True)
class Outcome:
    """The outcome of split training."""

    adapter: str
    """Directory of the adapter."""
    scheme: str
    clients: tuple[str, ...]
    examples: int
    target_tokens: int
    """An epoch."""
    steps: int
    loss_first: float
    """Of the training loss, which without ids is no cross-entropy: judge by ``after``."""
    loss_last: float
    before: dict[str, Quality]
    """By client, and ``overall``; empty where nobody held examples back."""
    after: dict[str, Quality]
    distinct_targets: int
    """``|C|``; 0 where targets are ids."""
    negatives: int
    """``|N|``."""
    train_s: float
    contributions: tuple[str, ...] = ()
    """Ids of those trained on; empty in step schemes, which keep none."""

    def to_json(self) -> dict[str, Any]:
        """The fields as one JSON object, with perplexities."""
        judged = {
            when: {who: asdict(q) | {"perplexity": q.perplexity} for who, q in quality.items()}
            for when, quality in (("before", self.before), ("after", self.after))
        }
        return asdict(self) | judged


def outcome_of(
    job: Job,
    clients: Sequence[str],
    joined: Candidates | None,
    losses: Sequence[float],
    quality: Mapping[str, dict[str, Quality]],
    *,
    examples: int,
    target_tokens: int,
    train_s: float,
    contributions: Sequence[str] = (),
) -> Outcome:
    """What came of a training.

    Args:
        job: with its ``split`` section.
        clients: their names.
        joined: what the loss compared with; None where that was ids, or the clients' own.
        losses: of each step.
        quality: ``before`` and ``after``.
        examples: of an epoch, as ``target_tokens``.
        target_tokens: supervised positions.
        train_s: seconds of training.
        contributions: ids of those trained on.
    """
    return Outcome(
        adapter=str(job.output),
        scheme=(job.split or Split()).scheme,
        clients=tuple(clients),
        examples=examples,
        target_tokens=target_tokens,
        steps=len(losses),
        loss_first=losses[0],
        loss_last=losses[-1],
        before=quality["before"],
        after=quality["after"],
        distinct_targets=0 if joined is None else joined.targets,
        negatives=0 if joined is None else joined.negatives,
        train_s=train_s,
        contributions=tuple(contributions),
    )


def write_result(
    directory: Path,
    job: Job,
    tensors: Mapping[str, Tensor],
    outcome: Outcome,
    losses: Sequence[float],
    *,
    decoder: Decoder,
) -> None:
    """Write adapter, job, quality and the training loss of each step into an existing directory.

    ``decoder`` is the model's description.

    Raises:
        OSError, SafetensorError: the files could not be written (see :func:`potluck.models.save.replace_directory`).
    """
    linears = sorted({linear for name in tensors if (linear := linear_of(name)) is not None})
    assert job.adapter is not None, "settings.settle refuses others"
    feedforward = [name for name in linears if decoder.cuts[decoder.within_block(name)] == "row"]
    config = adapter_config(job.adapter, job.model, linears, feedforward=feedforward, inputs_first=decoder.inputs_first)
    write_adapter(directory, tensors, config, chat_template=own_template(job))
    (directory / JOB_FILE).write_text(dump_job(job), encoding="utf-8")
    (directory / QUALITY_FILE).write_text(json.dumps(outcome.to_json(), indent=2) + "\n", encoding="utf-8")
    lines = [json.dumps({"event": "step", "step": step, "loss": loss}) for step, loss in enumerate(losses, 1)]
    (directory / METRICS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
