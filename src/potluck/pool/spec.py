"""What a device's process is told, as one line of JSON, and what of it another machine may say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from potluck.errors import BadInput
from potluck.job import Job


class DeviceSpec(BaseModel):
    """One device of one generation."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)  # it holds a token

    task: Literal["measure", "train"] = "train"
    """``measure``: make a profile; ``train``: run the job."""
    name: str
    rank: int
    world_size: int
    names: tuple[str, ...]
    """Of all devices, by rank."""
    job: dict[str, Any]
    threads: int
    nice: bool = False
    """Whether to stand back behind what people do on this machine."""
    pace: float | None = None
    """The speed of an emulated device."""
    owns: bool = False
    """Whether this device has training data: those its job names."""

    plan: dict[str, Any] | None = None
    """To train by."""
    config: dict[str, Any] | None = None
    """The fields of the model's config, to train."""
    work: dict[str, Any] | None = None
    """To measure."""
    fresh: bool = False
    """Whether to measure again what was measured before."""

    store: str | None = None
    """File by which devices of one machine find each other; else they do so over the control channel."""
    generation: int = 0
    access: dict[str, str] | None = None
    """The control channel."""
    address: str = "127.0.0.1"
    """Where this device listens for the others."""

    model_dir: str | None = None
    """The model; None where it comes from the coordinator."""
    cache: str = ""
    """Where a fetched model is kept."""
    template: str | None = None
    """Text of the coordinator's own chat template."""
    result_dir: str | None = None
    """Where rank 0 puts the result."""


SHARED_FIELDS = ("plan", "config", "work")
"""Of a task: the same on all devices, of this machine and others."""


class Assignment(BaseModel):
    """What a coordinator may have the device of another machine do; nothing in it names a file of that machine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    """As in :class:`DeviceSpec`, which knows the tasks."""
    name: str
    rank: Annotated[int, Field(ge=1)]
    """Never 0, which writes the result."""
    world_size: int
    names: tuple[str, ...]
    owns: bool
    job: Job
    plan: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    work: dict[str, Any] | None = None
    generation: int = 0
    template: str | None = None


def assigned_spec(
    told: object, name: str, data: Sequence[str], local: Mapping[str, Any], *, data_may_leave: bool = False
) -> dict[str, Any]:
    """The spec of the device called ``name`` on this machine, by an :class:`Assignment` that came from outside.

    Args:
        told: the assignment as JSON values.
        name: of this machine in the pool.
        data: what it trains on, if it is to bring data.
        local: fields that this machine alone decides.
        data_may_leave: whether a job may ask for these data with ``data_stays: false``.

    Raises:
        BadInput: it is no assignment, not one for this device, or asks for data that nobody brought or that stay here.
    """
    try:
        assignment = Assignment.model_validate(told)
    except ValidationError as error:
        fault = error.errors()[0]
        why = f"{'.'.join(str(part) for part in fault['loc'])}: {fault['msg']}"
        raise BadInput(f"The coordinator asks for what a joined device does not do ({why}).") from None
    names, rank = assignment.names, assignment.rank
    if not (len(names) == assignment.world_size > rank and names[rank] == assignment.name == name):
        raise BadInput(f"The coordinator asks for what a joined device does not do ({name} is not its rank {rank}).")
    if assignment.owns and not data:
        raise BadInput(f"The coordinator asks for data, but {name} joined without: join with --data.")
    if assignment.owns and not (assignment.job.data_stays or data_may_leave):
        raise BadInput(
            f"The job may send the data of {name} to other devices (data_stays: false), and {name} joined to keep them:"
            " set data_stays: true, or join with --data-may-leave."
        )
    job = without_paths(assignment.job, data if assignment.owns else ("-",))
    return {**assignment.model_dump(mode="json"), "job": job.model_dump(mode="json"), **local}


def without_paths(job: Job, train: Sequence[str] = ("-",)) -> Job:
    """The job without what lies on the disk of the machine that wrote it, and with ``train`` for its data.

    A chat template in a file becomes ``auto``: its text travels beside the job.
    """
    template = "chatml" if job.data.template == "chatml" else "auto"
    data = job.data.model_copy(update={"train": list(train), "eval": [], "template": template, "format": "auto"})
    return job.model_copy(update={"model": "-", "output": Path("-"), "overwrite": False, "data": data})
