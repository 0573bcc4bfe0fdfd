"""What was measured on a device, and for which work: a file that plans are made from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from potluck.errors import BadInput
from potluck.job_sections import IA3, Adapter, Lora, OptimizerName, Train, adapter_of


class _Plain(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Line(_Plain):
    """``alpha + beta * units``, fitted through a few measured points."""

    alpha: float
    beta: float
    points: tuple[tuple[int, float], ...] = ()
    """What was measured: units, and seconds or bytes."""

    def __call__(self, units: float) -> float:
        """The fitted value at ``units``."""
        return self.alpha + self.beta * units


class Work(_Plain):
    """What a device was measured at; profiles can be planned together only if theirs are equal."""

    config: dict[str, Any]
    """The fields of the model's config (:func:`potluck.models.families.fields.fields_of`)."""
    rows: int
    """Rows ``B`` of one half-batch."""
    length: int
    """Positions ``S`` of a row."""
    supervised: int
    """Supervised positions ``N`` of one half-batch."""
    longest: int = 0
    """Positions of the longest row, for which memory must do; 0 where all are of ``length``."""
    dtype: Literal["fp32", "bf16", "fp64"]
    train: Train
    lora: Lora
    ia3: IA3 = IA3()
    checkpointing: bool
    optimizer: OptimizerName = "adamw"
    sequence: bool = False
    """Whether a head of whole sequences is trained, in place of one over the vocabulary."""

    @property
    def adapter(self) -> Adapter | None:
        """What is trained beside the model; None where that is the model itself."""
        return adapter_of(self.train, self.lora, self.ia3)


class Machine(_Plain):
    """What a profile was taken on."""

    processor: str
    architecture: str
    cores: int
    threads: int
    """Threads the device computes with."""


class Link(_Plain):
    """What an all-reduce over the whole group costs, as ``latency_s + bytes / bytes_per_s``.

    ``bytes`` is the size of the reduced tensor.
    """

    latency_s: float
    bytes_per_s: float
    world_size: int = 2
    """Devices of the group it was measured over; a plan of fewer devices scales by ``2 (n - 1) / n``."""
    covered_s: float = 0.0
    """By how much a message of ``covered_bytes`` delays this device's compute that goes on meanwhile."""
    covered_bytes: int = 0


class Profile(_Plain):
    """One device's measurements.

    Seconds are those of one half-batch in one block, forward and backward together, with the replicated piece (residual
    add, norm) in front: what passes between two messages, twice.
    """

    potluck: str
    """Version of potluck that measured it."""
    torch: str
    device: str
    """Name of the device."""
    machine: Machine
    work: Work
    attention_s: Line
    """By query heads."""
    mlp_s: Line
    """By MLP columns."""
    head_s: Line
    """Of the head and the last norm, by vocabulary rows, for a half-batch's supervised positions."""
    forward_part: float
    """Part of a block's seconds that is forward."""
    one_row_part: float | None = None
    """Seconds of a walk of one row, as a part of those of the measured rows; None where one row was measured."""
    optimizer_s: Line
    """Of one optimizer step, by trained elements."""
    attention_bytes: Line
    """What the graphs of one half-batch in one block keep from the forward to the backward walk, by query heads."""
    mlp_bytes: Line
    """The same, by MLP columns."""
    runtime_bytes: int
    """Resident memory of a device's process beside weights, activations, gradients and optimizer state."""
    available_bytes: int
    """Memory a new process can have on this machine."""
    link: Link | None = None
    """None where it was not measured."""

    def part_of(self, rows: float) -> float:
        """Seconds of a walk of ``rows`` rows, as a part of those of the measured rows.

        A line through one row and the measured rows: small walks read the same weights for less.
        """
        measured = self.work.rows
        if measured == 1 or self.one_row_part is None:
            return rows / measured
        return self.one_row_part + (1 - self.one_row_part) * (rows - 1) / (measured - 1)


def write_profile(profile: Profile, path: Path) -> None:
    """Put a profile into a JSON file, whole or not at all.

    Raises:
        BadInput: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(profile.model_dump_json(indent=2) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise BadInput(f"{path} cannot be written: {error.strerror}.") from None


def read_profile(path: Path) -> Profile:
    """Read what :func:`write_profile` wrote.

    Raises:
        BadInput: the file is missing, or is no profile of this version of potluck.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadInput(f"There is no profile at {path}.") from None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read as a profile: {error}.") from None
    return parse_profile(content, where=str(path))


def parse_profile(content: Mapping[str, Any], where: str) -> Profile:
    """Check a profile given as plain values; ``where`` names its source in messages.

    Raises:
        BadInput: it is no profile, or one that another version of potluck wrote.
    """
    from potluck import __version__

    if isinstance(content, Mapping) and content.get("potluck", __version__) != __version__:
        raise BadInput(
            f"{where} was measured by potluck {content['potluck']}, and this is {__version__}: measure again with "
            "'potluck profile'."
        )
    try:
        profile = Profile.model_validate(content)
    except ValidationError as error:
        fault = error.errors()[0]
        raise BadInput(
            f"{where} is no profile: {'.'.join(str(part) for part in fault['loc']) or 'it'}: {fault['msg']}."
        ) from None
    if impossible := _impossible(profile):
        raise BadInput(f"{where} is no profile: {impossible}.")
    return profile


def _impossible(profile: Profile) -> str:
    """What cannot have been measured, and would make plans nonsense or divide by zero; empty if nothing."""
    for name in ("attention_s", "mlp_s", "head_s", "optimizer_s", "attention_bytes", "mlp_bytes"):
        line: Line = getattr(profile, name)
        if line.alpha < 0 or line.beta < 0:
            return f"{name}: alpha and beta are never negative"
        if name in ("attention_s", "mlp_s", "head_s") and line.alpha + line.beta == 0:
            return f"{name}: nothing computes in no time"
    if not 0 <= profile.forward_part <= 1:
        return f"forward_part: {profile.forward_part} is not from 0 to 1"
    if profile.one_row_part is not None and not 0 < profile.one_row_part <= 1:
        return f"one_row_part: {profile.one_row_part} is not above 0 and at most 1"
    link = profile.link
    if link is not None and (link.bytes_per_s <= 0 or min(link.latency_s, link.covered_s) < 0 or link.world_size < 2):
        return "link: a rate is above 0, times are not below 0, devices are at least 2"
    return ""
