"""One training run, top to bottom: check, plan, score, train on the devices, save, score what was saved."""

import gc
import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from potluck.job import Job, dump_job
from potluck.models.families import decoder_of, read_config
from potluck.models.precision import choose_dtype, torch_dtype
from potluck.models.save import check_output, replace_directory
from potluck.models.source import resolve
from potluck.models.targets import match_targets
from potluck.pool.launch import Event, run_devices
from potluck.pool.listener import Listener
from potluck.pool.plan import Plan, make_plan
from potluck.pool.result import Evaluated, Result, Tally
from potluck.texts.batch import Example
from potluck.texts.rows import Row, read_rows
from potluck.use import JOB_FILE, METRICS_FILE, encode_for, score


def tune(job: Job, *, listener: Listener | None = None) -> Result:
    """Run a job on local devices, one process each, and put the result in ``job.output``.

    The result is a PEFT adapter (a plain checkpoint where ``train: full``) with the resolved job as ``job.yaml`` and
    one line a step in ``metrics.jsonl``. It appears whole or not at all. Held-out examples are scored before training
    and again with what was saved, read back from disk.

    Raises:
        BadInput: the job, its data, its model or its output cannot be used; nothing was written.
        DeviceLost: a device ended before the training did; nothing was written.
        SaveFailed: the result could not be written; what stood there before is untouched.
    """
    listener = listener or Listener()
    check_output(job.output, job.overwrite)
    train_rows = read_rows(job.data.train, job.data.format)  # the device that owns them reads them again
    eval_rows = read_rows(job.data.eval, job.data.format)
    job = resolved(job, [*train_rows, *eval_rows])
    model_dir = resolve(job.model, tell=listener.tell)
    config = read_config(model_dir)
    plan = make_plan(job, config)
    if job.train == "lora":
        match_targets(job.lora.targets, decoder_of(config).linears)  # refused here, before anything slow
    shape = config.get_text_config()
    job = job.model_copy(update={"dtype": choose_dtype(job.dtype, shape.hidden_size, shape.intermediate_size)})
    encode_for(model_dir, train_rows, job.data)  # also refused here
    listener.planned(plan)
    held_out = encode_for(model_dir, eval_rows, job.data) if eval_rows else []
    before = _score("before", model_dir, None, held_out, job, listener)

    with (
        replace_directory(job.output, job.overwrite) as result_dir,
        (result_dir / METRICS_FILE).open("w", encoding="utf-8") as metrics,
    ):
        tally = Tally(metrics)
        _train(job, model_dir, plan, result_dir, tally, listener)
        (result_dir / JOB_FILE).write_text(dump_job(job), encoding="utf-8")
        if job.train == "full":
            after = _score("after", result_dir, None, held_out, job, listener)
        else:
            after = _score("after", model_dir, result_dir, held_out, job, listener)
        if before is not None and after is not None:
            tally.scored(before, after)
    return tally.result(plan, job.output, before=before, after=after)


def resolved(job: Job, rows: Sequence[Row]) -> Job:
    """The job with paths that hold from anywhere, and with the format of its rows where they have one in common."""
    formats = {row.format for row in rows}
    data = job.data.model_copy(
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


def _train(job: Job, model_dir: Path, plan: Plan, result_dir: Path, tally: Tally, listener: Listener) -> None:
    def on_event(event: Event) -> None:
        tally.event(event)
        listener.event(event)

    count = len(plan.devices)
    listener.tell(f"Starting {count} device{'s' if count > 1 else ''}.")
    with tempfile.TemporaryDirectory(prefix="potluck-") as private:  # made with mode 0700
        common: Mapping[str, object] = {
            "world_size": count,
            "job": job.model_dump(mode="json"),
            "model_dir": str(model_dir),
            "store": str(Path(private) / "store"),
            "threads": job.threads or max(1, len(os.sched_getaffinity(0)) // count),
            "plan": plan.to_json(),
            "result_dir": str(result_dir),
        }
        run_devices([{"rank": rank, "name": share.name, **common} for rank, share in enumerate(plan.devices)], on_event)


def _score(
    when: str, model_dir: Path, adapter: Path | None, held_out: list[Example], job: Job, listener: Listener
) -> Evaluated | None:
    if not held_out:
        return None
    listener.tell(f"Scoring {len(held_out):,} held-out examples {when} training.")
    dtype = torch_dtype(job.dtype)
    scores = score(model_dir, adapter, held_out, dtype, progress=partial(listener.scoring, when))
    gc.collect()  # the model's memory is the devices' now
    evaluated = Evaluated(accuracy=scores.accuracy, loss=scores.loss)
    listener.scored(when, evaluated)
    return evaluated
