"""What a training run is judged by: its steps, told as JSON lines while it runs and summed up at the end."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any, Self, TextIO

from potluck.errors import PotluckError
from potluck.models.evaluate_classes import ClassScores
from potluck.pool.plan import Plan


@dataclass(frozen=True)
class Evaluated:
    """Scores on the held-out examples."""

    accuracy: float | None
    """Exact match of greedy generation, or the part of the texts whose class is right; None where the examples have
    neither answers nor classes."""
    loss: float
    """Mean cross-entropy of the target tokens or of the classes, in nats; of values, the mean squared error."""
    f1: float | None = None
    """These are of classes and of values: see :class:`potluck.models.evaluate_classes.ClassScores`."""
    matthews: float | None = None
    pearson: float | None = None
    spearman: float | None = None

    @classmethod
    def of(cls, scores: ClassScores) -> Self:
        """The scores of a classifier."""
        return cls(**{field.name: getattr(scores, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class DeviceResult:
    """What one device held, and how it spent the run."""

    name: str
    heads: int
    columns: int
    vocab_rows: int
    peak_rss_mib: float
    compute_s: float
    wait_s: float
    """Seconds it stood still because another device was slower."""
    transfer_s: float
    """Seconds it stood still because a message was on its way."""
    links: tuple[int, int] | None = None
    """``[first, last + 1]`` of a stage's links, attention and MLP of each block in turn; None where it walked all."""
    speed: float = 0.0
    """``data``: how much of the rows it took, in proportion; 0 where it took the rows it owns."""


@dataclass(frozen=True)
class OwnerResult:
    """What one owner of data brought to the run."""

    name: str
    examples: int
    target_tokens: int
    """Over all steps: the weight of its data."""


@dataclass(frozen=True)
class Result:
    """The outcome of :func:`potluck.tune`."""

    strategy: str
    step_s: float
    """Median seconds a step."""
    idle_ratio: float
    """Part of the devices' time spent waiting for a slower one: sum of ``wait_s`` / (devices x sum of step times)."""
    tokens_per_s: float
    loss_first: float
    loss_last: float
    eval_before: Evaluated | None
    eval_after: Evaluated | None
    adapter: str
    """Directory of the adapter, or of the plain checkpoint where all weights were trained."""
    devices: tuple[DeviceResult, ...]
    owners: tuple[OwnerResult, ...]
    predicted_step_s: float | None = None
    """What the plan expected a step to take; None where it was not made from measurements."""

    @property
    def prediction_error(self) -> float | None:
        """``predicted / measured - 1``: above 0 where the plan expected a step to take longer than it did."""
        return None if self.predicted_step_s is None else self.predicted_step_s / self.step_s - 1

    def to_json(self) -> dict[str, Any]:
        """The fields as one JSON object."""
        return asdict(self) | {"prediction_error": self.prediction_error}


class Tally:
    """Sums up the events of a run, and writes each step to a file as it comes."""

    def __init__(self, metrics: TextIO) -> None:
        self._metrics = metrics
        self._steps: list[dict[str, Any]] = []
        self._peak_rss_mib: dict[int, float] = {}
        self._examples: dict[int, int] = {}

    def event(self, event: dict[str, Any]) -> None:
        """Take note of one event of a device."""
        if event["event"] == "step":
            self._steps.append(event)
            self._write(event)
        elif event["event"] == "data":
            self._examples[event["rank"]] = event["examples"]
        elif event["event"] == "finished":
            self._peak_rss_mib[event["rank"]] = event["peak_rss_mib"]

    def scored(self, before: Evaluated | None, after: Evaluated) -> None:
        """Add the scores to the metrics; there are none before where a classifier was new."""
        self._write({"event": "eval", "before": None if before is None else asdict(before), "after": asdict(after)})

    def result(
        self,
        plan: Plan,
        adapter: Path | str,
        *,
        before: Evaluated | None = None,
        after: Evaluated | None = None,
        predicted_step_s: float | None = None,
    ) -> Result:
        """The sum of it all.

        Raises:
            PotluckError: there was no step.
        """
        if not self._steps:
            raise PotluckError("The devices ended without a single step of training.")
        time_s = sum(step["step_s"] for step in self._steps)
        devices = tuple(
            DeviceResult(
                name=share.name,
                heads=len(share.heads),
                columns=len(share.columns),
                vocab_rows=len(share.vocab_rows),
                peak_rss_mib=self._peak_rss_mib.get(rank, 0.0),
                compute_s=self._total(rank, "compute_s"),
                wait_s=self._total(rank, "wait_s"),
                transfer_s=self._total(rank, "transfer_s"),
                links=None if share.links is None else share.links.spans[0],
                speed=share.speed,
            )
            for rank, share in enumerate(plan.devices)
        )
        owners = tuple(
            OwnerResult(plan.devices[rank].name, count, sum(step["owned_targets"][rank] for step in self._steps))
            for rank, count in sorted(self._examples.items())
        )
        return Result(
            strategy=plan.strategy,
            step_s=median(step["step_s"] for step in self._steps),
            idle_ratio=sum(device.wait_s for device in devices) / (len(devices) * time_s),
            tokens_per_s=sum(step["tokens"] for step in self._steps) / time_s,
            loss_first=self._steps[0]["loss"],
            loss_last=self._steps[-1]["loss"],
            eval_before=before,
            eval_after=after,
            adapter=str(adapter),
            devices=devices,
            owners=owners,
            predicted_step_s=predicted_step_s,
        )

    def _total(self, rank: int, clock: str) -> float:
        return float(sum(step["devices"][rank][clock] for step in self._steps))

    def _write(self, line: dict[str, Any]) -> None:
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()  # so that a run can be followed while it goes on
