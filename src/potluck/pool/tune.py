"""One training run, top to bottom: check, plan, score, train on the devices, save, score what was saved."""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from potluck.classify import has_classifier, in_order_of, score_classifier
from potluck.errors import BadInput
from potluck.job import JOB_FILE, METRICS_FILE, Job, dump_job
from potluck.models.families import decoder_for, read_config
from potluck.models.families.fields import fields_of
from potluck.models.precision import torch_dtype
from potluck.models.save import check_output, replace_directory
from potluck.models.shapes import check_model
from potluck.models.source import resolve
from potluck.models.targets import targets_of
from potluck.pool.crew import Crew, Gathering, LocalCrew, Manners, check_devices, check_gathering, joined_crew
from potluck.pool.decide import decide
from potluck.pool.launch import Event
from potluck.pool.launched import LaunchedCrew, led_ranks
from potluck.pool.listener import Listener
from potluck.pool.plan import Plan, make_plan
from potluck.pool.ranks import Launch, Ranks
from potluck.pool.ratio import parse_devices
from potluck.pool.result import Evaluated, Result, Tally
from potluck.texts.batch import Example
from potluck.texts.labelled import Labelled
from potluck.texts.task_rows import TaskRow, read_for, with_classes, with_columns
from potluck.use import encode_for, score

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def tune(
    job: Job,
    *,
    gathering: Gathering | None = None,
    launch: Launch | None = None,
    manners: Manners | None = None,
    listener: Listener | None = None,
) -> Result:
    """Run a job and put the result in ``job.output``.

    The result is a PEFT adapter (a plain checkpoint where ``train: full``) with the resolved job as ``job.yaml`` and
    one line a step in ``metrics.jsonl``. It appears whole or not at all. Held-out examples are scored before training
    and again with what was saved, read back from disk.

    Args:
        job: what to do.
        gathering: other machines to wait for; without it, the devices are processes of this machine.
        launch: the ranks a launcher has started, of which this is rank 0.
        manners: how this machine computes.
        listener: told how it goes.

    Raises:
        BadInput: the job, its data, its model or its output cannot be used; nothing was written.
        DeviceLost: a device ended before the training did; nothing was written.
        SaveFailed: the result could not be written; what stood there before is untouched.
    """
    if job.split is not None:
        raise BadInput(
            "This job has a 'split' section, for clients and a server: run 'potluck serve' on it, or take it out."
        )
    listener, manners = listener or Listener(), manners or Manners()
    with ExitStack() as stack:
        ranks = None if launch is None else stack.enter_context(led_ranks(launch))
        return _tune(job, gathering, ranks, manners, listener)


def _tune(job: Job, gathering: Gathering | None, ranks: Ranks | None, manners: Manners, listener: Listener) -> Result:
    if gathering is not None and ranks is not None:
        raise BadInput("A launcher started this process: --peers is for machines that join by themselves. Use one.")
    if gathering is not None:
        check_gathering(job, gathering)
    if ranks is not None:
        world_size = ranks.launch.world_size
        check_devices(job, world_size, f"the launcher, which started {world_size} ranks,")
    check_output(job.output, job.overwrite)
    train_rows = read_for(job.task, job.data.train, job.data)  # the device that owns them reads them again
    eval_rows = read_for(job.task, job.data.eval, job.data)
    classes_named = bool(job.data.labels)
    job = resolved(job, train_rows, eval_rows)
    model_dir = resolve(job.model, tell=listener.tell)
    config = read_config(model_dir)
    if job.task == "sequence-classification" and not classes_named and has_classifier(model_dir):
        job = job.model_copy(update={"data": in_order_of(config, job.data)})
    decoder = decoder_for(config, job)
    check_model(model_dir, decoder)
    if job.adapter is not None:
        targets_of(job.adapter, decoder)  # refused here, before anything slow
    if gathering is None and ranks is None:
        make_plan(job, config)  # as is this
    examples = encode_for(model_dir, train_rows, job.data)  # and this
    held_out = encode_for(model_dir, eval_rows, job.data) if eval_rows else []

    with _crew(job, model_dir, gathering, ranks, manners, listener) as crew:
        decision = decide(job, config, examples, crew, listener)
        job, plan = decision.job, decision.plan
        listener.planned(plan)
        before = _before(model_dir, held_out, job, listener)
        with (
            replace_directory(job.output, job.overwrite) as result_dir,
            (result_dir / METRICS_FILE).open("w", encoding="utf-8") as metrics,
        ):
            tally = Tally(metrics)
            _train(job, config, model_dir, plan, crew, result_dir, tally, listener)
            (result_dir / JOB_FILE).write_text(dump_job(job), encoding="utf-8")
            if job.train == "full":
                after = _score("after", result_dir, None, held_out, job, listener)
            else:
                after = _score("after", model_dir, result_dir, held_out, job, listener)
            if after is not None:
                tally.scored(before, after)
    predicted_step_s = None if decision.prediction is None else decision.prediction.step_s
    return tally.result(plan, job.output, before=before, after=after, predicted_step_s=predicted_step_s)


def _crew(
    job: Job,
    model_dir: Path,
    gathering: Gathering | None,
    ranks: Ranks | None,
    manners: Manners,
    listener: Listener,
) -> AbstractContextManager[Crew]:
    if ranks is not None:
        return nullcontext(LaunchedCrew(ranks, model_dir, job.threads, manners))
    if gathering is not None:
        return joined_crew(job, model_dir, gathering, manners, listener)
    return nullcontext(LocalCrew(len(parse_devices(job.devices)), job.threads, manners))


def resolved(job: Job, train_rows: Sequence[TaskRow], eval_rows: Sequence[TaskRow]) -> Job:
    """The job with paths that hold from anywhere, and with what its rows say of themselves.

    That is their format or their columns, where they have them in common, and the classes of the training rows.

    Raises:
        BadInput: the training rows have one class, or some rows have a second text and others have none.
    """
    rows = [*train_rows, *eval_rows]
    formats = {row.format for row in rows if not isinstance(row, Labelled)}
    data = with_classes(with_columns(job.data, rows), train_rows).model_copy(
        update={
            "train": [_absolute(source) for source in job.data.train],
            "eval": [_absolute(source) for source in job.data.eval],
            "template": job.data.template if job.data.template in ("auto", "chatml") else _absolute(job.data.template),
            "format": formats.pop() if len(formats) == 1 else job.data.format,
        }
    )
    return job.model_copy(update={"model": _absolute(job.model), "data": data, "output": job.output.absolute()})


def _absolute(source: str) -> str:
    """A path that exists, made absolute; anything else (a hub id, a keyword) as it is."""
    return str(Path(source).absolute()) if Path(source).exists() else source


def _train(
    job: Job,
    config: "PretrainedConfig",
    model_dir: Path,
    plan: Plan,
    crew: Crew,
    result_dir: Path,
    tally: Tally,
    listener: Listener,
) -> None:
    def on_event(event: Event) -> None:
        tally.event(event)
        listener.event(event)

    count = len(plan.devices)
    listener.tell(f"Starting {count} device{'s' if count > 1 else ''}.")
    fields = {
        "plan": plan.to_json(),
        "config": fields_of(config),
        "model_dir": str(model_dir),
        "result_dir": str(result_dir),
    }
    crew.run("train", job, fields, on_event)


def _before(model_dir: Path, held_out: list[Example], job: Job, listener: Listener) -> Evaluated | None:
    """Scores before training; a classifier that the model does not have yet would only guess."""
    if held_out and job.task != "causal-lm" and not has_classifier(model_dir):
        listener.tell(f"The model has no head for {job.task} yet: there is nothing to score before training.")
        return None
    return _score("before", model_dir, None, held_out, job, listener)


def _score(
    when: str, model_dir: Path, adapter: Path | None, held_out: list[Example], job: Job, listener: Listener
) -> Evaluated | None:
    if not held_out:
        return None
    listener.tell(f"Scoring {len(held_out):,} held-out examples {when} training.")
    dtype, progress = torch_dtype(job.dtype), partial(listener.scoring, when)
    if job.task == "causal-lm":
        scores = score(model_dir, adapter, held_out, dtype, progress=progress)
        evaluated = Evaluated(accuracy=scores.accuracy, loss=scores.loss)
    else:
        evaluated = Evaluated.of(score_classifier(model_dir, adapter, held_out, dtype, job.data, progress=progress))
    gc.collect()  # the model's memory is the devices' now
    listener.scored(when, evaluated)
    return evaluated
