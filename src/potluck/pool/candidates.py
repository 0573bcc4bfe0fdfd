"""Plans of every strategy for the same devices, and which is the best, with reasons."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from potluck.chain.ranges import split_by
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families.decoder import Decoder
from potluck.pool.cost import Prediction, Units, predict
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.profile import Profile, Work
from potluck.pool.reasons import alone_s, if_all_on_one, missing, too_slow, why
from potluck.pool.search import NoFit, search
from potluck.pool.task import Task, task_of

_WORTH_TELLING = 0.98
_MOVED_LIMIT_S = 0.5


@dataclass(frozen=True)
class Candidate:
    """One strategy's plan, whether it can be carried out, and what it would take."""

    strategy: str
    feasible: bool
    reason: str
    """Why it cannot be carried out, or how it compares."""
    plan: Plan | None = None
    """None where the model fits in no way."""
    prediction: Prediction | None = None
    proven: bool = True
    """Whether no other shares of this strategy are faster; False where the search ran out of time."""


def plans(
    job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], must: Collection[str] = ()
) -> list[Candidate]:
    """A candidate for ``single``, ``tensor`` and ``tensor-uniform``, the best of each.

    ``single`` is the coordinator alone; where ``data_stays`` is false, each other device alone is listed too, although
    training has to be started there. ``tensor`` is the best group of two devices or more; ``tensor-uniform`` is all
    devices with even shares, the remainder to the fastest.

    Args:
        job: the job.
        decoder: the model's description.
        work: what the devices were measured at.
        profiles: of all devices, coordinator first, names distinct; ranks are in this order.
        must: names of devices that have data and so take part, the coordinator always among them.

    Raises:
        BadInput: an adapter's target matches nothing, or a link is missing.
    """
    owners = {profiles[0].device, *must}
    task = task_of(job, decoder, work, owners=len(owners))
    found = [_single(task, profiles[0], owners)]
    if not job.data_stays:
        found += [_single(task, profile, owners) for profile in profiles[1:]]
    found += [_tensor(task, profiles, owners), _uniform(task, profiles, owners)]
    return _with_reasons(task, profiles, found)


def best(candidates: Sequence[Candidate], strategy: str = "auto") -> Candidate:
    """The feasible candidate with the shortest step, of one strategy or (``auto``) of all.

    Raises:
        BadInput: there is none (says why).
    """
    wanted = [c for c in candidates if strategy in ("auto", c.strategy)]
    if chosen := _fastest(wanted):
        return chosen
    named = {c.strategy: c.reason for c in reversed(wanted)}
    if strategy == "auto" and "tensor" in named and "single" in named:
        raise BadInput(f"No plan fits. Alone: {named['single']} Together: {named['tensor']}")
    raise BadInput(f"strategy: '{strategy}' cannot be carried out: {named.get(strategy, 'it is not known here.')}")


def if_data_moved(
    job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], must: Collection[str], chosen: Candidate
) -> str | None:
    """What would be faster than ``chosen`` if data could move to other devices, in a sentence; None if nothing."""
    owners = {profiles[0].device, *must}
    task = task_of(job, decoder, work, owners=len(owners))
    options = [(f"{c.plan.devices[0].name} alone", c) for p in profiles if (c := _single(task, p, {p.device})).plan]
    if len(owners) > 1:
        moved = _tensor(task, profiles, {profiles[0].device}, time_limit_s=_MOVED_LIMIT_S)
        if moved.plan is not None:
            options.append((" + ".join(device.name for device in moved.plan.devices), moved))
    steps = [(c.prediction.step_s, who) for who, c in options if c.prediction is not None and c.feasible]
    if not steps or chosen.prediction is None:
        return None
    step_s, who = min(steps)
    if step_s > _WORTH_TELLING * chosen.prediction.step_s:
        return None
    faster = chosen.prediction.step_s / step_s
    return f"If data could move, {who} would take {step_s:.2f} s a step, {faster:.2f}x as fast; as it is, data stay."


def _single(task: Task, profile: Profile, owners: Collection[str]) -> Candidate:
    plan, prediction = _planned(task, "single", [profile], [Units(*task.totals)], owners)
    others = sorted(set(owners) - {profile.device})
    if short := missing(prediction):
        return Candidate("single", False, short, plan, prediction)
    if len(others) > 1 or (others and profile.device in owners):
        reason = f"the data of {', '.join(others)} would have to move to {profile.device}."
        return Candidate("single", False, reason, plan, prediction)
    if others:
        reason = f"{profile.device} is not where this run starts: move the data there and train there alone."
        return Candidate("single", False, reason, plan, prediction)
    return Candidate("single", True, "", plan, prediction)


def _tensor(
    task: Task, profiles: Sequence[Profile], owners: Collection[str], *, time_limit_s: float = 1.2
) -> Candidate:
    if len(profiles) < 2:
        return Candidate("tensor", False, "there is one device only.")
    try:
        found = search(task, profiles, owners, at_least=2, time_limit_s=time_limit_s)
    except NoFit as error:
        return Candidate("tensor", False, str(error))
    group = [profiles[i] for i in found.members]
    plan, prediction = _planned(task, "tensor", group, found.units, owners)
    feasible, reason = if_all_on_one(plan, owners)
    return Candidate("tensor", feasible, reason, plan, prediction, found.proven)


def _uniform(task: Task, profiles: Sequence[Profile], owners: Collection[str]) -> Candidate:
    if len(profiles) < 2:
        return Candidate("tensor-uniform", False, "there is one device only.")
    fastest_first = sorted(range(len(profiles)), key=lambda i: alone_s(task, profiles[i]))
    place = {device: rank for rank, device in enumerate(fastest_first)}
    shares = [
        Units(*(total // len(profiles) + (place[i] < total % len(profiles)) for total in task.totals))
        for i in range(len(profiles))
    ]
    plan, prediction = _planned(task, "tensor-uniform", profiles, shares, owners)
    short = missing(prediction)
    return Candidate("tensor-uniform", not short, short, plan, prediction)


def _planned(
    task: Task, strategy: str, group: Sequence[Profile], shares: Sequence[Units], owners: Collection[str]
) -> tuple[Plan, Prediction]:
    prediction = predict(task, group, shares, owners=owners)
    cuts = (split_by(getattr(units, kind) for units in shares) for kind in ("heads", "columns", "vocab_rows"))
    devices = tuple(
        DeviceShare(profile.device, *ranges) for profile, ranges in zip(group, zip(*cuts, strict=True), strict=True)
    )
    return Plan(strategy, devices, prediction.step_s, prediction.idle_ratio), prediction


def _fastest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Of equals the first: the simpler strategy."""
    usable = [c for c in candidates if c.feasible and c.prediction is not None]
    return min(usable, key=lambda c: c.prediction.step_s if c.prediction else 0.0, default=None)


def _with_reasons(task: Task, profiles: Sequence[Profile], candidates: Sequence[Candidate]) -> list[Candidate]:
    """Say of feasible plans why they are best, or by how much they are not."""
    chosen = _fastest(candidates)
    told = []
    for c in candidates:
        if c.feasible and c.plan is not None and c.prediction is not None and chosen is not None and chosen.prediction:
            why_this = f"{c.reason} {why(task, profiles, c.plan, c.prediction)}".strip()
            reason = why_this if c is chosen else f"{c.reason} {too_slow(c.prediction, chosen.prediction)}".strip()
            told.append(replace(c, reason=reason, plan=replace(c.plan, why=why_this)))
        else:
            told.append(c)
    return told
