"""The job file: what to train, on what, how, and with which devices.

A job is YAML read into :class:`Job`; the resolved job (every default filled in) is saved beside the result, so that
``potluck tune OUT/job.yaml`` repeats the run.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from potluck.errors import BadInput

JOB_FILE = "job.yaml"
"""The resolved job, beside a result."""
METRICS_FILE = "metrics.jsonl"
"""A line a step, beside a result."""

Format = Literal["auto", "messages", "conversations", "instruction", "prompt", "text", "label"]
Task = Literal["causal-lm", "sequence-classification", "sequence-regression"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _spelt(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _named(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    if any(isinstance(name, bool) for name in value):
        raise ValueError("YAML takes names such as yes, no, on and off for truth values: write them in quotes")
    return [_spelt(name) for name in value]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(_Strict):
    """Where the examples come from and how they become token ids."""

    train: Annotated[list[str], BeforeValidator(_listed)] = []
    """Files (.jsonl .json .csv .parquet .txt .md), a ``datasets`` directory, or a hub dataset id. Left out where others
    contribute the examples."""
    eval: Annotated[list[str], BeforeValidator(_listed)] = []
    """Held-out examples in the same formats; scored before and after training."""
    format: Format = "auto"
    """How a row is read; ``auto`` decides by its keys."""
    template: str = "auto"
    """Chat data: ``auto`` (the tokenizer's own template), ``chatml``, or a path to a Jinja file."""
    supervise: Literal["answers", "all"] = "answers"
    """Which tokens have a label: the answers, or the prompts too."""
    max_length: Annotated[int, Field(ge=2)] = 1024
    """Tokens an example may have; longer ones are cut, and dropped if no supervised token is left."""
    text: str | None = None
    """Classification and regression: the column of the text; found by its name if left out."""
    text_pair: str | None = None
    """The column of a second text, for tasks of pairs."""
    label: str | None = None
    """The column of the class, or of the value."""
    labels: Annotated[list[str], BeforeValidator(_named)] = []
    """Names of the classes, in the order of their indices; if left out, those found in ``train``, sorted."""

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        columns = [column for column in (self.text, self.text_pair, self.label) if column is not None]
        if len(set(columns)) < len(columns):
            raise ValueError("text, text_pair and label must be different columns")
        if len(set(self.labels)) < len(self.labels):
            raise ValueError("labels names a class twice")
        if len(self.labels) == 1:
            raise ValueError("labels names one class only; there must be at least two to tell apart")
        return self

    def own_template(self) -> str | None:
        """Text of the chat template, where ``template`` names a file."""
        path = Path(self.template)
        return path.read_text(encoding="utf-8") if path.is_file() else None


class Lora(_Strict):
    """Low-rank adapters (Hu et al., 2021), saved in PEFT's format."""

    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)] = ["all-linear"]
    """``all-linear``, or names of linears such as ``q_proj``, ``down_proj``."""


class Shares(_Strict):
    """What each device holds, by hand; each list has one entry a device and sums to the model's total.

    A list left out follows the ratio of ``devices``.
    """

    heads: list[Annotated[int, Field(ge=0)]] | None = None
    columns: list[Annotated[int, Field(ge=0)]] | None = None
    vocab_rows: list[Annotated[int, Field(ge=0)]] | None = None


class Split(_Strict):
    """Training divided between clients, which run the embedding and the first blocks, and a server."""

    scheme: Literal["one-shot", "l-shaped", "u-shaped"] = "one-shot"
    """``one-shot``: a client uploads its activations once and leaves; ``l-shaped``: in every step, and the loss is
    computed on the server; ``u-shaped``: the loss is computed on the client, which holds the labels."""
    cut: Annotated[int, Field(ge=1)] = 2
    """Blocks on the client's side."""
    client: Literal["frozen", "trainable"] = "frozen"
    """Whether the client's blocks get adapters too."""
    targets: Literal["embeddings", "ids"] = "embeddings"
    """What tells the server the labels: rows of the embedding table (loss ``target``), or token ids, which are the text
    itself (loss ``exact``). Not used by ``u-shaped``, which never sends labels."""
    negatives: Annotated[int, Field(ge=0)] | Literal["table"] = 4096
    """Rows of the table, drawn at random, that stand for the tokens nobody has as a target; all clients together.
    ``table``: clients draw none, and the server takes all rows of its own copy of the model."""
    encoding: Literal["fp32", "bf16", "int8", "int4"] = "int8"
    """What activations and tables travel in and are stored in."""
    clients: Annotated[int, Field(ge=1)] | None = None
    """How many clients are expected: each draws its part of the negatives; a step scheme begins when all have come."""
    average_every: Annotated[int, Field(ge=1)] = 10
    """Steps after which trainable clients' adapters are averaged, weighted by target tokens."""
    weight_cap: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest part of an epoch's target tokens that may come from one client."""
    store: Path | None = None
    """Where the server keeps contributions; ``OUTPUT-store`` if left out."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.scheme == "one-shot" and self.client == "trainable":
            raise ValueError(
                "a client of scheme one-shot leaves after its upload, so that its blocks cannot be trained: "
                "client: frozen, or another scheme"
            )
        return self


class Job(_Strict):
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

    train: Literal["lora", "full"] = "lora"
    lora: Lora = Lora()
    split: Split | None = None
    """Clients and a server (``potluck serve``); left out, devices train together (``potluck tune``)."""

    strategy: Literal["auto", "single", "tensor", "tensor-uniform", "pipeline", "pipeline-uniform", "data"] = "auto"
    """``auto``: the fastest that fits and is allowed, where devices are measured; else ``single`` for one device and
    ``tensor`` for more. ``single``: one device, no messages. ``tensor``: each device has a share of every layer, as
    ``devices`` or ``shares`` say, or as measured; ``tensor-uniform``: even shares. ``pipeline``: each has some of the
    layers; ``pipeline-uniform``: as many as the others. ``data``: each has the whole model, and some of the rows."""
    devices: Annotated[str, BeforeValidator(_spelt)] = "1"
    """How many local devices (``3``), or their shares (``3:2:1``)."""
    shares: Shares | None = None
    data_stays: bool = True
    """Token ids and labels never leave the device that has them. ``false`` allows strategies that move them:
    ``pipeline`` sends ids to the first device of the chain and labels to the last one, ``data`` sends rows to who walks
    them (with ``true`` each owner walks its own)."""
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.micro_batch_size is not None and self.micro_batch_size > self.batch_size:
            raise ValueError(f"micro_batch_size {self.micro_batch_size} is larger than batch_size {self.batch_size}")
        if self.split is None and not self.data.train:
            raise ValueError("data.train names no examples; only a job with a 'split' section goes without")
        if self.split is not None and self.train == "full":
            raise ValueError("split trains adapters: train: lora")
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
        faults = [f"{'.'.join(str(part) for part in e['loc']) or 'job'}: {e['msg']}" for e in error.errors()]
        raise BadInput(f"{where}: " + "; ".join(faults) + ".") from None


def dump_job(job: Job) -> str:
    """The resolved job as YAML, without leave to overwrite: that is given anew each time."""
    content = job.model_dump(mode="json", exclude={"overwrite"})
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
