"""What a server's job means on this machine: its model, where the store is, and what clients must agree with."""

from dataclasses import dataclass
from pathlib import Path

from potluck.control.files import ModelFiles
from potluck.errors import BadInput
from potluck.job import Job
from potluck.job_sections import Split
from potluck.models.families import decoder_of, read_config, with_frozen
from potluck.models.families.decoder import Decoder
from potluck.models.shapes import check_model
from potluck.models.source import resolve
from potluck.models.targets import targets_of
from potluck.split.agreement import Agreement, agreement_of
from potluck.split.check import Limits
from potluck.split.listener import SplitListener
from potluck.split.parts import check_cut


@dataclass(frozen=True)
class Settled:
    """A job whose names have been looked up."""

    job: Job
    split: Split
    model_dir: Path
    files: ModelFiles
    decoder: Decoder
    agreement: Agreement

    @property
    def limits(self) -> Limits:
        """What is accepted of clients."""
        longest = min(self.job.data.max_length, self.decoder.max_positions)
        return Limits(self.agreement, self.decoder.hidden_size, self.decoder.vocab_size, longest)

    @property
    def store_dir(self) -> Path:
        """Where contributions are kept."""
        return store_dir(self.job)


def store_dir(job: Job) -> Path:
    """Where a job's contributions are kept: ``split.store``, or the output's name with ``-store``."""
    split = job.split or Split()
    output = job.output.absolute()
    return (split.store or output.with_name(f"{output.name}-store")).absolute()


def settle(job: Job, listener: SplitListener) -> Settled:
    """Look up what the job names; reads the model's files once for their digests.

    Raises:
        BadInput: the model cannot be used or cut there, or an adapter's target matches nothing.
    """
    if job.adapter is None:
        raise BadInput("Split training trains adapters, not the whole model: train: lora or train: ia3.")
    split = job.split or Split()
    model_dir = resolve(job.model, tell=listener.tell)
    decoder = decoder_of(read_config(model_dir))
    check_cut(decoder, split.cut)
    check_model(model_dir, decoder)
    frozen = split.cut if split.client == "frozen" else 0
    targets_of(job.adapter, with_frozen(decoder, frozen))
    own_template(job)
    files = ModelFiles(model_dir)
    agreement = agreement_of(files.listing(), split.cut, split.encoding, split.targets)
    model = str(Path(job.model).absolute()) if Path(job.model).exists() else job.model
    job = job.model_copy(update={"model": model, "output": job.output.absolute(), "split": split})
    return Settled(job, split, model_dir, files, decoder, agreement)


def own_template(job: Job) -> str | None:
    """The text of the chat template that the job names, where it names a file.

    Raises:
        BadInput: there is no such file.
    """
    template = job.data.own_template()
    if template is None and job.data.template not in ("auto", "chatml"):
        raise BadInput(f"data.template: there is no file {job.data.template}.")
    return template
