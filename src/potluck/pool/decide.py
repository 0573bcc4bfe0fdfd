"""From a job and the devices that have come to the plan they train by."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from potluck.errors import BadInput, PotluckError
from potluck.job import Job
from potluck.models.families import decoder_for
from potluck.models.precision import choose_dtype
from potluck.pool.candidates import Candidate, best, if_data_moved, plans
from potluck.pool.cost import Prediction
from potluck.pool.crew import COORDINATOR, Crew
from potluck.pool.embeddings import moves_all
from potluck.pool.listener import Listener
from potluck.pool.measured_work import work_of
from potluck.pool.plan import Plan, make_plan, what_leaves
from potluck.pool.predict_plan import predict_plan
from potluck.pool.profile import Profile, parse_profile
from potluck.pool.reasons import missing
from potluck.texts.batch import Example

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Decision:
    """What will be done."""

    job: Job
    """With its dtype resolved."""
    plan: Plan
    prediction: Prediction | None = None
    """None where nothing was measured."""


def decide(
    job: Job, config: "PretrainedConfig", examples: Sequence[Example], crew: Crew, listener: Listener
) -> Decision:
    """Measure the devices, if they are of several machines, and choose who holds what; who is not needed may go.

    Args:
        job: by ``devices`` or ``shares`` it may say itself who holds what.
        config: of the model.
        examples: the coordinator's.
        crew: the devices.
        listener: told profiles, plan and reasons.

    Raises:
        BadInput: no plan fits, or the model cannot do the job's task.
        DeviceLost: a device ended.
    """
    decoder = decoder_for(config, job)
    if not crew.measured:
        dtype = choose_dtype(job.dtype, decoder.hidden_size, decoder.intermediate_size)
        job = job.model_copy(update={"dtype": dtype})
        return Decision(job, make_plan(job, config, crew.names))
    listener.tell(f"Measuring {len(crew.names)} devices.")
    profiles, longest = _measured(job, config, examples, crew)
    work = profiles[COORDINATOR].work.model_copy(update={"longest": longest})
    job = job.model_copy(update={"dtype": work.dtype})
    owners = [crew.names[rank] for rank in crew.owners]
    if job.shares is not None or ":" in job.devices:
        by_ratio = job if ":" in job.devices else job.model_copy(update={"devices": str(len(crew.names))})
        plan = make_plan(by_ratio, config, crew.names, owners)
        prediction = predict_plan(job, decoder, work, profiles, plan, owners)
        if short := missing(prediction):
            raise BadInput(f"These shares do not fit: {short} Give that device less, or leave the shares to potluck.")
        moves_data = bool(what_leaves(plan.devices, owners)) or moves_all(
            job, decoder, plan.strategy, len(plan.devices)
        )
        by_hand = Candidate(plan.strategy, True, "", plan, prediction, moves_data=moves_data)
        listener.chosen([by_hand], by_hand, None)
        return Decision(job, plan, prediction)
    candidates = plans(job, decoder, work, profiles, owners)
    chosen = best(candidates, job.strategy)
    assert chosen.plan is not None
    moved = if_data_moved(job, decoder, work, profiles, owners, chosen, candidates) if job.data_stays else None
    listener.chosen(candidates, chosen, moved)
    _send_home_who_is_not_needed(crew, chosen.plan)
    return Decision(job, chosen.plan, chosen.prediction)


def _measured(
    job: Job, config: "PretrainedConfig", examples: Sequence[Example], crew: Crew
) -> tuple[list[Profile], int]:
    """Every device's profile, in the order of ranks, and the tokens of the longest example of all owners."""
    decided = job if job.dtype != "auto" else job.model_copy(update={"dtype": "fp32"})  # until the devices decide
    work = work_of(decided, config, examples, len(crew.owners))
    found: dict[int, Profile] = {}
    longest = [work.longest]

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "profile":
            found[event["rank"]] = parse_profile(event["profile"], where=crew.names[event["rank"]])
            longest.append(int(event.get("longest", 0)))

    crew.run("measure", job, {"work": work.model_dump(mode="json")}, on_event)
    if silent := [name for rank, name in enumerate(crew.names) if rank not in found]:
        raise PotluckError(f"{', '.join(silent)} ended without a profile.")
    return [found[rank] for rank in sorted(found)], max(longest)


def _send_home_who_is_not_needed(crew: Crew, plan: Plan) -> None:
    ranks = [crew.names.index(device.name) for device in plan.devices]
    if len(ranks) < len(crew.names):
        alone = "alone" if len(ranks) == 1 else "without this device"
        crew.keep(ranks, f"{crew.names[COORDINATOR]} trains faster {alone}: this device is not needed.")
