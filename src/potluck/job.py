"""The job file: what to train, on what, how, and with which devices.

A job is YAML read into :class:`Job`; the resolved job (every default filled in) is saved beside the result, so that
``potluck tune OUT/job.yaml`` repeats the run.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from potluck.errors import BadInput
from potluck.job_sections import (
    IA3,
    Adapter,
    Data,
    Lora,
    OptimizerName,
    Section,
    Shares,
    Split,
    Task,
    Train,
    adapter_of,
    spelt,
)

JOB_FILE = "job.yaml"
"""The resolved job, beside a result."""
METRICS_FILE = "metrics.jsonl"
"""A line a step, beside a result."""


class Job(Section):
    """One fine-tuning job."""

    model: str
    """A Hugging Face directory, a hub id, or a .gguf file."""
    task: Task = "causal-lm"
    """``causal-lm``: to say the answers; ``sequence-classification``: to name the class of a text, or of a pair of
    texts; ``sequence-regression``: to give it a value."""
    data: Data = Data()
    output: Path
    """Directory of the result; must be empty or absent unless ``overwrite``."""
    overwrite: bool = False

    train: Train = "lora"
    """``lora`` and ``ia3``: adapters, as the section of that name says; ``full``: the model itself."""
    lora: Lora = Lora()
    ia3: IA3 = IA3()
    train_embeddings: bool = False
    """With ``train: full``, the embedding tables too: of tokens, positions and segments. An LM head that is the token
    table is trained with it; one of its own stays as it is."""
    frozen_blocks: Annotated[int, Field(ge=0)] = 0
    """So many of the model's first blocks stay as they are."""
    split: Split | None = None
    """Clients and a server (``potluck serve``); left out, devices train together (``potluck tune``)."""

    strategy: Literal["auto", "single", "tensor", "tensor-uniform", "pipeline", "pipeline-uniform", "data"] = "auto"
    """``auto``: the fastest that fits and is allowed, where devices are measured; else ``single`` for one device and
    ``tensor`` for more. ``single``: one device, no messages. ``tensor``: each device has a share of every layer, as
    ``devices`` or ``shares`` say, or as measured; ``tensor-uniform``: even shares. ``pipeline``: each has some of the
    layers; ``pipeline-uniform``: as many as the others. ``data``: each has the whole model, and some of the rows."""
    devices: Annotated[str, BeforeValidator(spelt)] = "1"
    """How many local devices (``3``), or their shares (``3:2:1``)."""
    shares: Shares | None = None
    data_stays: bool = True
    """Token ids and labels never leave the device that has them. ``false`` allows strategies that move them:
    ``pipeline`` sends ids to the first device of the chain and labels to the last one, ``data`` sends rows to who walks
    them (with ``true`` each owner walks its own), ``tensor`` sends both to all devices where they train a table that is
    embedding and LM head."""
    half_batches: Literal[1, 2] = 2
    """How many parts of a micro-batch are in flight, so that one computes while the other's message travels."""
    wire: Literal["fp32", "bf16"] = "fp32"
    """What messages between devices travel in."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Threads a device; 0 divides the machine's cores among the local devices."""

    steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps; wins over ``epochs``."""
    epochs: Annotated[float, Field(gt=0)] = 1.0
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Examples an optimizer step."""
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Examples computed at once; the whole batch if left out."""
    optimizer: OptimizerName = "adamw"
    """``lion`` keeps one value of each trained element where ``adamw`` keeps two; it wants a learning rate some three
    to ten times smaller, and with it a larger weight decay."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.03
    """Part of the steps over which the rate rises from zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    dtype: Literal["auto", "fp32", "bf16", "fp64"] = "auto"
    """What the linears compute in; ``auto`` measures which of fp32 and bf16 is faster here."""
    checkpointing: bool = False
    """Recompute each piece in the backward walk instead of keeping its activations."""
    seed: int = 0

    @property
    def adapter(self) -> Adapter | None:
        """What is trained beside the model; None where that is the model itself."""
        return adapter_of(self.train, self.lora, self.ia3)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}")
        if self.split is None and not self.data.train:
            raise ValueError("data.train names no examples; only a job with a 'split' section goes without")
        if self.split is not None and self.train_embeddings:
            raise ValueError("split never trains embeddings: take out train_embeddings")
        if self.train_embeddings and self.train != "full":
            raise ValueError(
                "train_embeddings needs train: full; an adapter that holds whole embeddings (PEFT's modules_to_save) is"
                " not made"
            )
        for unused, default in {"lora": Lora(), "ia3": IA3()}.items():
            if self.train not in (unused, "full") and getattr(self, unused) != default:
                raise ValueError(f"{unused} says something, and is not used with train: {self.train}: take it out")
        if self.split is not None and self.train == "full":
            raise ValueError("split trains adapters: train: lora or train: ia3")
        if self.train_embeddings and self.frozen_blocks:
            raise ValueError("train_embeddings and frozen_blocks exclude each other: embeddings lie below all blocks")
        if self.split is not None and self.frozen_blocks:
            raise ValueError("frozen_blocks is not for split, where split.cut and split.client: frozen say the same")
        self._check_task()
        for source in self._replaced_sources():
            raise ValueError(
                f"output {self.output} is or holds {source}, which --overwrite would delete: name another directory"
            )
        return self

    def _check_task(self) -> None:
        data = self.data
        if self.task == "causal-lm":
            if data.text or data.text_pair or data.label or data.labels:
                raise ValueError(
                    "data.text, data.text_pair, data.label and data.labels are for task: sequence-classification or "
                    "sequence-regression"
                )
            return
        if self.split is not None:
            raise ValueError(f"split trains causal-lm only, not {self.task}: take out 'split', and use potluck tune")
        if data.format not in ("auto", "label"):
            raise ValueError(
                f"data.format: '{data.format}' is for causal-lm; {self.task} reads columns: data.text and data.label"
            )
        if self.task == "sequence-regression" and data.labels:
            raise ValueError("data.labels are classes, and sequence-regression has none")

    def _replaced_sources(self) -> Iterator[str]:
        """What the job reads and would delete to make room for its result."""
        if self.overwrite:
            output = self.output.resolve()
            template = [] if self.data.template in ("auto", "chatml") else [self.data.template]
            for source in (self.model, *self.data.train, *self.data.eval, *template):
                path = Path(source).expanduser()
                if path.exists() and path.resolve().is_relative_to(output):
                    yield source


class _Loader(yaml.SafeLoader):
    """YAML in which ``3:2:1`` are shares; YAML 1.1 takes them for a number in base 60."""


_RATIO = ("tag:yaml.org,2002:str", re.compile(r"[\d.]+(:[\d.]+)+"))
_Loader.yaml_implicit_resolvers = {
    first: [_RATIO, *resolvers] for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_job(path: Path | str) -> Job:
    """Read a job file.

    Raises:
        BadInput: the file is missing, is not YAML, or a field is unknown or has a value it cannot have.
    """
    path = Path(path)
    try:
        content = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)
    except FileNotFoundError:
        raise BadInput(f"There is no job file at {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{path} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(content, dict):
        raise BadInput(f"{path} holds no job: expected fields such as 'model:', 'data:' and 'output:'.")
    return parse_job(content, where=str(path))


def parse_job(content: dict[str, object], where: str = "job") -> Job:
    """Check a job given as a mapping; ``where`` names its source in messages.

    Raises:
        BadInput: a field is unknown, missing, or has a value it cannot have.
    """
    try:
        return Job.model_validate(content)
    except ValidationError as error:
        faults = [
            f"{'.'.join(str(part) for part in e['loc']) or 'job'}: {e['msg'].removeprefix('Value error, ')}"
            for e in error.errors()
        ]
        raise BadInput(f"{where}: " + "; ".join(faults) + ".") from None


def dump_job(job: Job) -> str:
    """The resolved job as YAML, without leave to overwrite: that is given anew each time."""
    content = job.model_dump(mode="json", exclude={"overwrite"})
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
