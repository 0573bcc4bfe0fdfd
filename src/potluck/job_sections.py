"""The sections of a job file, and what their fields may be."""

import math
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Format = Literal["auto", "messages", "conversations", "instruction", "prompt", "text", "label"]
OptimizerName = Literal["adamw", "lion"]
Task = Literal["causal-lm", "sequence-classification", "sequence-regression"]


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def spelt(value: object) -> object:
    """A number as it is written: YAML reads names such as ``3`` as one."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _named(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    if any(isinstance(name, bool) for name in value):
        raise ValueError("YAML takes names such as yes, no, on and off for truth values: write them in quotes")
    return [spelt(name) for name in value]


class Section(BaseModel):
    """Fields by name; others are refused, and none changes once it is read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Data(Section):
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


class Lora(Section):
    """Low-rank adapters (Hu et al., 2021), saved in PEFT's format."""

    rank: Annotated[int, Field(ge=1)] = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)] = ["all-linear"]
    """``all-linear``, or names of linears such as ``q_proj``, ``down_proj``."""
    use_rslora: bool = False
    """Scale by ``alpha / sqrt(rank)`` in place of ``alpha / rank`` (Kalajdzievski, 2023): large ranks learn as fast."""
    use_dora: bool = False
    """Train a magnitude of each output beside the adapter, which then turns its row of weights (DoRA, Liu et al.,
    2024)."""

    @property
    def scale(self) -> float:
        """What ``B A`` is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


class IA3(Section):
    """Vectors that scale what linears give, or what they are given: (IA)^3 (Liu et al., 2022), in PEFT's format."""

    targets: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)] = ["auto"]
    """``auto``: key and value (the one linear that gives both, where a family has such) and the MLP's second linear;
    ``all-linear``; or names of linears."""


Train = Literal["lora", "ia3", "full"]
Adapter = Lora | IA3


def adapter_of(train: Train, lora: Lora, ia3: IA3) -> Adapter | None:
    """What is trained beside the model; None where that is the model itself."""
    return {"lora": lora, "ia3": ia3, "full": None}[train]


class Shares(Section):
    """What each device holds, by hand; each list has one entry a device and sums to the model's total.

    A list left out follows the ratio of ``devices``.
    """

    heads: list[Annotated[int, Field(ge=0)]] | None = None
    columns: list[Annotated[int, Field(ge=0)]] | None = None
    vocab_rows: list[Annotated[int, Field(ge=0)]] | None = None


class Split(Section):
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
