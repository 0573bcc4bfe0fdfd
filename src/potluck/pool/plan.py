"""Who holds what: shares by ratio or by hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from transformers import PretrainedConfig

from potluck.chain.ranges import Ranges, split_by
from potluck.chain.share import Share
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families import decoder_of

MAX_LOCAL_DEVICES = 64


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


def make_plan(job: Job, config: PretrainedConfig, names: Sequence[str] | None = None) -> Plan:
    """The plan a job asks for by its ``devices`` and ``shares``; ``names`` of the devices, if they have any.

    Raises:
        BadInput: the model's family is unknown, the shares do not fit the model, or the strategy does not fit the
            number of devices.
    """
    model = decoder_of(config)
    ratio = parse_devices(job.devices)
    world_size = len(ratio)
    strategy = job.strategy if job.strategy != "auto" else ("single" if world_size == 1 else "tensor")
    if strategy == "single" and world_size > 1:
        raise BadInput(f"strategy: 'single' runs on one device, but devices is '{job.devices}'. Use 'tensor'.")
    if strategy == "tensor-uniform" and (len(set(ratio)) > 1 or job.shares is not None):
        raise BadInput(
            "strategy: 'tensor-uniform' gives even shares; leave out the ratio and 'shares', or use 'tensor'."
        )
    by_hand = {} if job.shares is None else job.shares.model_dump()
    totals = {"heads": model.num_heads, "columns": model.intermediate_size, "vocab_rows": model.vocab_size}
    cuts = {unit: split_by(_counts(unit, total, ratio, by_hand.get(unit))) for unit, total in totals.items()}
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


def parse_devices(devices: str) -> list[float]:
    """``"3"`` to three even parts, ``"3:2:1"`` to those parts.

    Raises:
        BadInput: it is neither.
    """
    try:
        parts = [float(part) for part in devices.split(":")]
    except ValueError:
        parts = []
    if len(parts) == 1:
        count = parts[0]
        parts = [1.0] * int(count) if 1 <= count <= MAX_LOCAL_DEVICES and count.is_integer() else []
    usable = all(part >= 0 for part in parts) and 0 < sum(parts) < float("inf")
    if not usable or not 1 <= len(parts) <= MAX_LOCAL_DEVICES:
        raise BadInput(
            f"devices: '{devices}' is neither a number of devices from 1 to {MAX_LOCAL_DEVICES}, such as 3,"
            " nor their shares, such as 3:2:1."
        )
    return parts


def apportion(total: int, ratio: Sequence[float]) -> list[int]:
    """Whole units by largest remainder; ties go to the larger part, then to the earlier device."""
    parts = [Fraction(part) for part in ratio]  # floats would lose ties to rounding, and the sum to overflow
    exact = [total * part / sum(parts) for part in parts]
    counts = [int(e) for e in exact]
    order = sorted(range(len(ratio)), key=lambda i: (-(exact[i] - counts[i]), -ratio[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _counts(unit: str, total: int, ratio: Sequence[float], by_hand: list[int] | None) -> list[int]:
    if by_hand is None:
        return apportion(total, ratio)
    listed = ", ".join(str(count) for count in by_hand)
    if len(by_hand) != len(ratio):
        raise BadInput(f"shares.{unit}: {len(by_hand)} numbers ({listed}) for {len(ratio)} devices.")
    if sum(by_hand) != total:
        names = {"heads": "query heads", "columns": "MLP columns", "vocab_rows": "vocabulary rows"}
        raise BadInput(f"shares.{unit}: {listed} make {sum(by_hand)}, but the model has {total} {names[unit]}.")
    return by_hand
