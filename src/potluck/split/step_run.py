"""A training in steps, top to bottom: wait for the clients, judge, take the steps, judge, save."""

import time

import torch
from torch import Tensor

from potluck.errors import PotluckError
from potluck.models.checkpoint import Checkpoint
from potluck.models.precision import torch_dtype
from potluck.models.save import replace_directory
from potluck.split.assembly import judging_table
from potluck.split.listener import SplitListener
from potluck.split.parts import client_part
from potluck.split.quality import Quality, summed_up
from potluck.split.result import OVERALL, Outcome, write_result
from potluck.split.settings import Settled
from potluck.split.step_judging import judged
from potluck.split.step_table import Connected, StepTable
from potluck.split.step_training import StepTraining, begin
from potluck.split.trainer import with_dtype


def train_in_steps(settled: Settled, table: StepTable, expected: int, listener: SplitListener) -> Outcome:
    """Train with the clients that come, and put the adapter in the job's output.

    Args:
        settled: the job.
        table: where their messages come in.
        expected: how many clients.
        listener: told how it goes.

    Raises:
        DeviceLost: every client has left.
        SaveFailed: the disk is full.
        PotluckError: the loss or a gradient is not finite.
    """
    settled = with_dtype(settled)
    job = settled.job
    if job.threads:
        torch.set_num_threads(job.threads)
    with Checkpoint.open(settled.model_dir) as checkpoint:

        def joined(client: Connected) -> None:
            listener.tell(f"{client.name} takes part with {client.examples:,} examples.")

        try:
            begun = table.gather(expected, settled.limits, joined)
            training = begin(settled, begun, table, checkpoint, _client_tensors(settled, checkpoint))
            before = _judged(training, checkpoint, "before", listener)
            start = time.monotonic()
            training.run(listener, time.monotonic)
            train_s = time.monotonic() - start
            after = _judged(training, checkpoint, "after", listener)
        except PotluckError as error:
            table.end(f"The server's training has ended: {error}")
            raise
    outcome = _outcome(training, before, after, train_s)
    with replace_directory(job.output, job.overwrite) as directory:
        tensors = training.learner.part.tensors() | training.averaged
        write_result(directory, job, tensors, outcome, training.losses)
    training.clients.dismiss()
    return outcome


def _client_tensors(settled: Settled, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The adapters that trainable clients begin with; none where they are frozen."""
    job, split = settled.job, settled.split
    if split.client == "frozen":
        return {}
    compute = torch_dtype(job.dtype)
    part = client_part(checkpoint, settled.decoder, split.cut, compute=compute, lora=job.lora, seed=job.seed)
    return part.part.tensors()


def _judged(training: StepTraining, checkpoint: Checkpoint, when: str, listener: SplitListener) -> dict[str, Quality]:
    clients, table_VD = training.clients, None
    if clients.assembly is not None and any(client.held_out for client in clients.here):
        table_VD = judging_table(checkpoint, training.settled.decoder, training.settled.split)
    everybodys = judged(clients, training.learner, table_VD)
    if not everybodys:
        return {}
    found = {OVERALL: summed_up(everybodys)}
    for place, client in enumerate(clients.everybody):
        if theirs := [each for each in everybodys if each.client == place]:
            found[client.name] = summed_up(theirs)
    listener.judged(when, found)
    return found


def _outcome(training: StepTraining, before: dict[str, Quality], after: dict[str, Quality], train_s: float) -> Outcome:
    clients = training.clients.everybody
    joined = None if training.clients.assembly is None else training.clients.assembly.candidates
    return Outcome(
        adapter=str(training.settled.job.output),
        scheme=training.settled.split.scheme,
        clients=tuple(client.name for client in clients),
        examples=sum(client.examples for client in clients),
        target_tokens=sum(client.target_tokens for client in clients),
        steps=len(training.losses),
        loss_first=training.losses[0],
        loss_last=training.losses[-1],
        before=before,
        after=after,
        distinct_targets=0 if joined is None else joined.targets,
        negatives=0 if joined is None else joined.negatives,
        train_s=train_s,
    )
