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
from potluck.split.quality import Quality, by_client
from potluck.split.result import Outcome, outcome_of, write_result
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
            clients, table_VD = training.clients.everybody, None
            if training.clients.assembly is not None and any(client.held_out for client in clients):
                table_VD = judging_table(checkpoint, settled.decoder, settled.split)
            quality = {"before": _quality("before", training, table_VD, listener)}
            start = time.monotonic()
            training.run(listener, time.monotonic)
            train_s = time.monotonic() - start
            quality["after"] = _quality("after", training, table_VD, listener)
        except PotluckError as error:
            table.end(f"The server's training has ended: {error}")
            raise
    outcome = outcome_of(
        job,
        [client.name for client in clients],
        None if training.clients.assembly is None else training.clients.assembly.candidates,
        training.losses,
        quality,
        examples=sum(client.examples for client in clients),
        target_tokens=sum(client.target_tokens for client in clients),
        train_s=train_s,
    )
    with replace_directory(job.output, job.overwrite) as directory:
        tensors = training.learner.part.tensors() | training.averaged
        write_result(directory, job, tensors, outcome, training.losses, decoder=settled.decoder)
    training.clients.dismiss()
    return outcome


def _client_tensors(settled: Settled, checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The adapters that trainable clients begin with; none where they are frozen."""
    job, split = settled.job, settled.split
    if split.client == "frozen":
        return {}
    compute = torch_dtype(job.dtype)
    part = client_part(checkpoint, settled.decoder, split.cut, compute=compute, adapter=job.adapter, seed=job.seed)
    return part.part.tensors()


def _quality(when: str, training: StepTraining, table_VD: Tensor | None, listener: SplitListener) -> dict[str, Quality]:
    """By client and overall; empty where nobody held examples back."""
    names = [client.name for client in training.clients.everybody]
    found = by_client(judged(training.clients, training.learner, table_VD), names)
    if found:
        listener.judged(when, found)
    return found
