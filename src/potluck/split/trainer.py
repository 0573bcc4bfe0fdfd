"""Training over the store, top to bottom: everything clients contributed, shuffled, for several epochs, in flat memory.

Through accelerate, so that the same command runs on one CPU, in several processes, or on GPUs, as its launcher says:
each process takes every n-th example of a batch.
"""

import hashlib
import json
import math
import os
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.adapter import WEIGHTS_FILE, read_config, read_tensors
from potluck.models.checkpoint import Checkpoint
from potluck.models.precision import choose_dtype, torch_dtype
from potluck.models.save import check_output, replace_directory
from potluck.split.agreement import contribution_id
from potluck.split.assembly import Assembly, assembly_of, example_weights, judging_table
from potluck.split.checkpoint import read_meta
from potluck.split.dataset import Dataset
from potluck.split.epochs import Epochs
from potluck.split.learner import Learner, Recipe
from potluck.split.listener import SplitListener
from potluck.split.parts import SplitPart, server_part
from potluck.split.quality import Quality, by_client, judge
from potluck.split.result import Outcome, outcome_of, write_result
from potluck.split.settings import Settled, settle
from potluck.split.store import Store
from potluck.split.together import same_contributions, same_dtype

CHECKPOINT_FILE = Path("training") / "checkpoint.safetensors"
CHECKPOINT_EVERY_S = 30.0


def train_store(
    job: Job,
    *,
    further: bool = False,
    listener: SplitListener | None = None,
    checkpoint_every_s: float = CHECKPOINT_EVERY_S,
) -> Outcome | None:
    """Train the server part on all contributions, and put the adapter in ``job.output``.

    A run that was ended goes on from its last checkpoint, if contributions and job are still the same. In several
    processes, the first one has the outcome and the others None.

    Args:
        job: the server's.
        further: begin with the adapter that is in ``job.output``, which is then replaced.
        listener: told how it goes; in several processes, only the first one's.
        checkpoint_every_s: seconds between checkpoints.

    Raises:
        BadInput: the job cannot be used, or nothing was contributed.
        SaveFailed: the disk is full; what stood at the output is untouched.
        PotluckError: the loss or a gradient is not finite.
    """
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    listener = listener if listener is not None and accelerator.is_main_process else SplitListener()
    overwrite = job.overwrite or further
    check_output(job.output, overwrite)
    settled = settle(job, listener)
    torch.set_num_threads(job.threads or max(1, (os.cpu_count() or 1) // accelerator.num_processes))
    store = Store(settled.store_dir)
    progress = store.directory / CHECKPOINT_FILE
    contributions = same_contributions(store, accelerator)
    with (
        store.training() if accelerator.is_main_process else nullcontext(),
        Dataset(store, "train", settled.agreement, contributions) as data,
        Dataset(store, "held-out", settled.agreement, data.contributions) as held,
        Checkpoint.open(settled.model_dir) as checkpoint,
    ):
        settled = with_dtype(settled, (read_meta(progress) or {}).get("dtype"))
        settled = replace(settled, job=job_with_dtype(settled.job, same_dtype(settled.job.dtype, accelerator)))
        epochs = _prepared(settled, data, checkpoint, accelerator)
        _warn(epochs, settled, listener)
        began = _from_adapter(job, epochs.learner.part) if further else ""
        table_VD = None
        if len(held):
            table_VD = judging_table(checkpoint, settled.decoder, settled.split, accelerator.device)
        quality = {"before": _quality("before", epochs, held, table_VD, listener)}
        key = _key(settled.job, data, accelerator, began)
        if resumed := epochs.resume(progress, key):
            listener.tell(f"Going on after step {resumed:,}, where an earlier run of this training ended.")
        start = time.monotonic()
        epochs.run(progress, key, checkpoint_every_s, listener.step)
        train_s = time.monotonic() - start
        quality["after"] = _quality("after", epochs, held, table_VD, listener)
    outcome = outcome_of(
        settled.job,
        data.client_names,
        epochs.assembly.candidates,
        epochs.losses,
        quality,
        examples=len(data),
        target_tokens=int(data.target_counts.sum()),
        train_s=train_s,
        contributions=[contribution_id(manifest) for manifest in data.contributions],
    )
    if accelerator.is_main_process:
        with replace_directory(job.output, overwrite) as directory:
            write_result(
                directory,
                settled.job,
                epochs.learner.part.tensors(),
                outcome,
                epochs.losses,
                decoder=settled.decoder,
            )
        progress.unlink(missing_ok=True)
    accelerator.wait_for_everyone()
    return outcome if accelerator.is_main_process else None


def learner_of(
    settled: Settled, checkpoint: Checkpoint, assembly: Assembly | None, steps: int, accelerator: Accelerator | None
) -> Learner:
    """The server part, its head and its optimizer; ``assembly`` None where clients compute the loss."""
    job = settled.job
    device = None if accelerator is None else accelerator.device
    part = server_part(
        checkpoint,
        settled.decoder,
        settled.split.cut,
        compute=torch_dtype(job.dtype),
        adapter=job.adapter,
        seed=job.seed,
        device=device,
        checkpointing=job.checkpointing,
    )
    recipe = Recipe.of(job, steps)
    return Learner(part, None if assembly is None else assembly.head, recipe, accelerator)


def with_dtype(settled: Settled, before: str | None = None) -> Settled:
    """The job with a dtype, where it leaves the choice: that of an earlier run, or the faster one here."""
    decoder, job = settled.decoder, settled.job
    asked = before if job.dtype == "auto" and before in ("fp32", "bf16") else job.dtype
    return replace(
        settled, job=job_with_dtype(job, choose_dtype(asked, decoder.hidden_size, decoder.intermediate_size))
    )


def job_with_dtype(job: Job, dtype: str) -> Job:
    """The same job computing in ``dtype``."""
    return job.model_copy(update={"dtype": dtype})


def _prepared(settled: Settled, data: Dataset, checkpoint: Checkpoint, accelerator: Accelerator) -> Epochs:
    job, compute = settled.job, torch_dtype(settled.job.dtype)
    assembly = assembly_of(data.tables(), checkpoint, settled.decoder, settled.split, compute, accelerator.device)
    steps = job.steps or max(1, math.ceil(job.epochs * math.ceil(len(data) / job.batch_size)))
    learner = learner_of(settled, checkpoint, assembly, steps, accelerator)
    weights = example_weights(data, settled.split.weight_cap)
    micro_batch_size = job.micro_batch_size or job.batch_size
    return Epochs(learner, assembly, data, job.batch_size, micro_batch_size, weights, accelerator, job.dtype)


def _warn(epochs: Epochs, settled: Settled, listener: SplitListener) -> None:
    """Say so where too few negatives came: every other token of the vocabulary then hardly counts."""
    joined, wanted = epochs.assembly.candidates, settled.split.negatives
    if joined is None or wanted == "table":
        return
    if joined.negatives < min(wanted, joined.vocab_size - joined.targets) // 2:
        listener.tell(
            f"Only {joined.negatives:,} of {wanted:,} negatives are here, since fewer clients have contributed than"
            " were expected (split.clients): the adapter may be worse for it."
        )


def _quality(
    when: str, epochs: Epochs, held: Dataset, table_VD: Tensor | None, listener: SplitListener
) -> dict[str, Quality]:
    """By client and overall; empty where nobody held examples back, and so no table is here."""
    if table_VD is None:
        return {}
    done = 0

    def advance(examples: int) -> None:
        nonlocal done
        done += examples
        listener.progress(f"Judging {when} training", done, len(held))

    held_out = epochs.assembly.held(held, table_VD)
    judged = judge(epochs.learner, held_out, table_VD, epochs.assembly.head.softcap, advance)
    found = by_client(list(judged), held.client_names)
    listener.judged(when, found)
    return found


def _from_adapter(job: Job, part: SplitPart) -> str:
    """Give the part the weights of the adapter in ``job.output``; the adapter's digest.

    Raises:
        BadInput: it is not an adapter of just these tensors, or scaled otherwise.
    """
    directory = job.output
    stored, config = read_tensors(directory), read_config(directory)
    if config["peft_type"] != job.train.upper():
        raise BadInput(
            f"{directory} cannot be trained further: it is of kind {config['peft_type']}, but train is {job.train}."
        )
    if job.train == "lora":
        if config.get("lora_alpha") != job.lora.alpha:
            raise BadInput(
                f"{directory} cannot be trained further: its alpha is {config.get('lora_alpha')}, but lora.alpha is "
                f"{job.lora.alpha:g}."
            )
        for field, wanted in (("use_rslora", job.lora.use_rslora), ("use_dora", job.lora.use_dora)):
            if (has := bool(config.get(field))) != wanted:
                raise BadInput(
                    f"{directory} cannot be trained further: its {field} is {has}, but lora.{field} is {wanted}."
                )
    for t in part.trained:
        if t.name not in stored or stored[t.name].shape != t.local.shape:
            raise BadInput(f"{directory} cannot be trained further: it lacks {t.name} of shape {tuple(t.local.shape)}.")
    if foreign := sorted(stored.keys() - {t.name for t in part.trained}):
        raise BadInput(f"{directory} cannot be trained further: it holds {foreign[0]}, which is not trained here.")
    with torch.no_grad():
        for t in part.trained:
            t.local.copy_(stored[t.name])
    with (directory / WEIGHTS_FILE).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _key(job: Job, data: Dataset, accelerator: Accelerator, began: str) -> str:
    """Of all that decides what a run comes to."""
    settings = job.model_dump(mode="json", exclude={"output", "overwrite", "threads"})
    contributions = [contribution_id(manifest) for manifest in data.contributions]
    content = [settings, contributions, began, accelerator.num_processes, torch.__version__]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
