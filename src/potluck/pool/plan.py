"""Who holds what: shares by ratio or by hand."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from potluck.chain.ranges import Ranges, split_by
from potluck.chain.share import Share
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import decoder_for
from potluck.models.families.decoder import Decoder
from potluck.pool.embeddings import why_not
from potluck.pool.exact import divides_rows
from potluck.pool.ratio import apportion, counts_of, parse_devices

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PIPELINES = ("pipeline", "pipeline-uniform")
TENSORS = ("tensor", "tensor-uniform")
_MICRO_BATCHES_A_STAGE = 2
"""With more of them stages wait less, and compute is cut smaller."""


@dataclass(frozen=True)
class DeviceShare:
    """One device of a plan, by name."""

    name: str
    heads: Ranges
    columns: Ranges
    vocab_rows: Ranges
    links: Ranges | None = None
    """A stage's part of the chain, attention and MLP of each block in turn: ``range(2 * layers)`` over all stages. None
    where a device walks the whole chain."""
    speed: float = 0.0
    """``data``: how much of a step's rows it takes, in proportion; 0 where it takes the rows it owns."""

    @property
    def share(self) -> Share:
        """What the chain needs to know of it."""
        return Share(self.heads, self.columns, self.vocab_rows)


@dataclass(frozen=True)
class Plan:
    """A strategy with every device's share, in rank order."""

    strategy: str
    devices: tuple[DeviceShare, ...]
    predicted_step_s: float | None = None
    """None where shares were given by hand, and nothing was measured."""
    predicted_idle_ratio: float | None = None
    why: str = ""
    """Why this plan, in a sentence or two; empty for shares by hand."""
    micro_batch_size: int | None = None
    """Rows walked at once; as the job says if None."""

    @property
    def shares(self) -> list[Share]:
        """Every rank's share."""
        return [device.share for device in self.devices]

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "strategy": self.strategy,
            "devices": [
                {
                    "name": d.name,
                    **{unit: getattr(d, unit).spans for unit in ("heads", "columns", "vocab_rows")},
                    **({} if d.links is None else {"links": d.links.spans}),
                    **({"speed": d.speed} if d.speed else {}),
                }
                for d in self.devices
            ],
            "predicted_step_s": self.predicted_step_s,
            "predicted_idle_ratio": self.predicted_idle_ratio,
            "why": self.why,
            "micro_batch_size": self.micro_batch_size,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Plan":
        """The plan :meth:`to_json` gave."""
        devices = [
            DeviceShare(
                device["name"],
                heads=_ranges(device["heads"]),
                columns=_ranges(device["columns"]),
                vocab_rows=_ranges(device["vocab_rows"]),
                links=_ranges(device["links"]) if "links" in device else None,
                speed=device.get("speed", 0.0),
            )
            for device in content["devices"]
        ]
        predicted = (content.get("predicted_step_s"), content.get("predicted_idle_ratio"), content.get("why", ""))
        return cls(content["strategy"], tuple(devices), *predicted, content.get("micro_batch_size"))


def _ranges(spans: Sequence[Sequence[int]]) -> Ranges:
    return Ranges(tuple((start, stop) for start, stop in spans))


def make_plan(
    job: Job,
    config: "PretrainedConfig",
    names: Sequence[str] | None = None,
    owners: Collection[str] | None = None,
) -> Plan:
    """The plan a job asks for by its ``devices`` and ``shares``.

    Args:
        job: its ``devices`` is a number or a ratio.
        config: of the model.
        names: of the devices, if they have any.
        owners: names of those that have training data; the first one if left out.

    Raises:
        BadInput: the model's family is unknown or cannot do the job's task, the shares do not fit the model, the
            strategy does not fit the number of devices, or it would move data that stay.
    """
    model = decoder_for(config, job)
    ratio = parse_devices(job.devices)
    world_size = len(ratio)
    strategy = job.strategy if job.strategy != "auto" else ("single" if world_size == 1 else "tensor")
    if reason := why_not(job, model, strategy, world_size, 1 if owners is None else len(owners)):
        raise BadInput(f"strategy: '{strategy}' is not possible: {reason}")
    if job.strategy in (*PIPELINES, "data"):
        names = names or [f"device-{rank}" for rank in range(world_size)]
        return _whole_links(job, model, names, ratio, [names[0]] if owners is None else owners)
    if strategy == "single" and world_size > 1:
        raise BadInput(f"strategy: 'single' runs on one device, but devices is '{job.devices}'. Use 'tensor'.")
    if strategy == "tensor-uniform" and (len(set(ratio)) > 1 or job.shares is not None):
        raise BadInput(
            "strategy: 'tensor-uniform' gives even shares; leave out the ratio and 'shares', or use 'tensor'."
        )
    if world_size > 1 and (divided := divides_rows(job.adapter, model)):
        raise BadInput(f"strategy: '{strategy}' is not possible: {divided}")
    by_hand = {} if job.shares is None else job.shares.model_dump()
    totals = {"heads": model.num_heads, "columns": model.intermediate_size, "vocab_rows": model.head_rows}
    cuts = {unit: split_by(counts_of(unit, total, ratio, by_hand.get(unit))) for unit, total in totals.items()}
    devices = [
        DeviceShare(
            names[rank] if names else f"device-{rank}",
            cuts["heads"][rank],
            cuts["columns"][rank],
            cuts["vocab_rows"][rank],
        )
        for rank in range(world_size)
    ]
    holders = [device.name for device in devices if device.heads or device.columns or device.vocab_rows]
    if len(holders) == 1 < world_size:
        raise BadInput(
            f"Every share goes to {holders[0]}: train there alone, with 'strategy: single' and without the others."
        )
    return Plan(strategy, tuple(devices))


def stage_devices(model: Decoder, names: Sequence[str], links: Sequence[Ranges]) -> tuple[DeviceShare, ...]:
    """Devices that hold these links whole, in rank order; the head is the last stage's."""
    end = 2 * len(model.layers)
    heads, columns, vocab_rows = _whole(model)
    return tuple(
        DeviceShare(name, heads, columns, vocab_rows if end - 1 in span else Ranges(()), links=span)
        for name, span in zip(names, links, strict=True)
    )


def row_devices(model: Decoder, names: Sequence[str], speeds: Sequence[float]) -> tuple[DeviceShare, ...]:
    """Devices that hold the whole model and take rows by their speeds; those they own, where all speeds are 0."""
    return tuple(DeviceShare(name, *_whole(model), speed=speed) for name, speed in zip(names, speeds, strict=True))


def what_leaves(devices: Sequence[DeviceShare], owners: Collection[str]) -> str:
    """What of the training data other devices than their owner would see; empty if nothing."""
    if all(device.links is not None for device in devices):
        ordered = sorted(devices, key=lambda device: device.links.spans if device.links else ())
        ends = {"ids": ordered[0].name, "labels": ordered[-1].name}
        return ", ".join(filter(None, (_to_ends(owner, ends) for owner in owners)))
    walkers = [device.name for device in devices if device.speed and [device.name] != list(owners)]
    return f"rows of {listed(list(owners))} would go to {listed(walkers)}" if walkers else ""


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def forbidden(leaves: str) -> str:
    """What to say where data stay."""
    return f"{leaves} (data_stays: true forbids it; set data_stays: false)."


def _to_ends(owner: str, ends: dict[str, str]) -> str:
    away = [(what, name) for what, name in ends.items() if name != owner]
    if len(away) == 2:
        return f"the ids of {owner}'s texts would go to {away[0][1]} and its labels to {away[1][1]}"
    return "".join(f"the {what} of {owner}'s texts would go to {name}" for what, name in away)


def _whole(model: Decoder) -> tuple[Ranges, Ranges, Ranges]:
    heads, columns, vocab_rows = model.num_heads, model.intermediate_size, model.head_rows
    return Ranges.of(0, heads), Ranges.of(0, columns), Ranges.of(0, vocab_rows)


def _whole_links(
    job: Job, model: Decoder, names: Sequence[str], ratio: Sequence[float], owners: Collection[str]
) -> Plan:
    """A plan of ``pipeline``, ``pipeline-uniform`` or ``data`` by a ratio."""
    strategy, world_size, links = job.strategy, len(ratio), 2 * len(model.layers)
    if world_size < 2:
        raise BadInput(f"strategy: '{strategy}' is for several devices, but devices is '{job.devices}'. Use 'single'.")
    if job.shares is not None:
        raise BadInput(f"shares: heads, columns and rows are not cut with strategy '{strategy}'; use 'tensor'.")
    if strategy == "pipeline-uniform" and len(set(ratio)) > 1:
        raise BadInput("strategy: 'pipeline-uniform' gives even stages; leave out the ratio, or use 'pipeline'.")
    micro_batch_size = job.micro_batch_size
    if strategy == "data":
        if idle := [name for name, part in zip(names, ratio, strict=True) if not part]:
            raise BadInput(
                f"devices: '{job.devices}' gives {', '.join(idle)} no rows: leave out who has nothing to do."
            )
        devices = row_devices(model, names, ratio)
    else:
        together, whole = model.links_together, links // model.links_together
        what = "link" if together == 1 else "block"
        counts = apportion(whole, ratio)
        if world_size > whole:
            raise BadInput(f"{world_size} stages need a {what} each, and the model has {whole}: use fewer devices.")
        if idle := [name for name, count in zip(names, counts, strict=True) if not count]:
            raise BadInput(f"devices: '{job.devices}' gives {', '.join(idle)} none of the model's {whole} {what}s.")
        devices = stage_devices(model, names, split_by([together * count for count in counts]))
        wanted = max(1, job.batch_size // (_MICRO_BATCHES_A_STAGE * world_size))
        micro_batch_size = min(micro_batch_size or wanted, job.batch_size)
        check_micro_batches(world_size, math.ceil(job.batch_size / micro_batch_size), micro_batch_size)
    if job.data_stays and (leaves := what_leaves(devices, owners)):
        raise BadInput(f"strategy: '{strategy}' is not possible: {forbidden(leaves)}")
    return Plan(strategy, devices, micro_batch_size=micro_batch_size)


def check_micro_batches(stages: int, micro_batches: int, rows: int) -> None:
    """See that a pipeline's stages can all be busy at the same time.

    Raises:
        BadInput: a step has fewer micro-batches (of ``rows`` rows) than there are stages.
    """
    if micro_batches < stages:
        have = "1 micro-batch" if micro_batches == 1 else f"{micro_batches} micro-batches"
        raise BadInput(
            f"{stages} stages of a pipeline need at least {stages} micro-batches a step, and a step has {have} of"
            f" {rows} row{'s' if rows > 1 else ''}: raise batch_size, or lower micro_batch_size."
        )
