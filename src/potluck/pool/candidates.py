"""Plans of every strategy for the same devices, and which is the best, with reasons."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from potluck.chain.ranges import Ranges, split_by
from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families.decoder import Decoder
from potluck.pool.cost import Prediction, Units, predict
from potluck.pool.embeddings import moves_all, why_not
from potluck.pool.exact import divides_rows
from potluck.pool.plan import (
    PIPELINES,
    TENSORS,
    DeviceShare,
    Plan,
    forbidden,
    row_devices,
    stage_devices,
    what_leaves,
)
from potluck.pool.profile import Profile, Work
from potluck.pool.reasons import alone_s, if_all_on_one, missing, too_slow, why
from potluck.pool.rows import best_rows, plan_rows
from potluck.pool.search import NoFit, search
from potluck.pool.stage_profiles import rows_a_turn
from potluck.pool.stages import best_stages, even_stages
from potluck.pool.task import Task, task_of

_WORTH_TELLING = 0.98
_MOVED_LIMIT_S = 0.5
_ONE_DEVICE = "there is one device only."


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
    moves_data: bool = False
    """Whether texts, as token ids or labels, would leave a device that has them."""


def plans(
    job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], must: Collection[str] = ()
) -> list[Candidate]:
    """A candidate for each strategy, the best of each; ``data_stays`` forbids some, which are predicted nevertheless.

    ``single`` is the coordinator alone; where ``data_stays`` is false, each other device alone is listed too, although
    training has to be started there. ``tensor`` and ``pipeline`` are the best groups of two devices or more;
    ``tensor-uniform`` and ``pipeline-uniform`` are all devices with even shares or stages, the remainder to the
    fastest. ``data`` is the owners, each with its own rows, where data stay and there are several; else the best group
    of two devices or more, with rows by speed.

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
    found = [single(task, profiles[0], owners)]
    if not job.data_stays:
        found += [single(task, profile, owners) for profile in profiles[1:]]
    if divided := divides_rows(job.adapter, decoder):
        found += [Candidate(strategy, False, divided if len(profiles) > 1 else _ONE_DEVICE) for strategy in TENSORS]
    else:
        found += [_tensor(task, profiles, owners), tensor_uniform(task, profiles, owners)]
    found += [_pipeline(strategy, job, decoder, work, profiles, owners) for strategy in PIPELINES]
    found.append(_data(job, decoder, work, profiles, owners))
    return _with_reasons(task, profiles, [_of_embeddings(job, decoder, each, owners) for each in found])


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
    job: Job,
    decoder: Decoder,
    work: Work,
    profiles: Sequence[Profile],
    must: Collection[str],
    chosen: Candidate,
    candidates: Sequence[Candidate] = (),
) -> str | None:
    """What would be faster than ``chosen`` if data could move to other devices, in a sentence; None if nothing.

    Candidates that fit but would move data are compared too.
    """
    owners = {profiles[0].device, *must}
    task = task_of(job, decoder, work, owners=len(owners))
    moved = [single(task, profile, {profile.device}) for profile in profiles]
    moved += [c for c in candidates if c.moves_data and c.strategy != "single"]
    if len(owners) > 1:
        if not divides_rows(job.adapter, decoder):
            moved.append(_tensor(task, profiles, {profiles[0].device}, time_limit_s=_MOVED_LIMIT_S))
        moved.append(_data(job.model_copy(update={"data_stays": False}), decoder, work, profiles, owners))
    steps = [
        (c.prediction.step_s, _who(c.plan)) for c in moved if c.plan and c.prediction and not missing(c.prediction)
    ]
    if not steps or chosen.prediction is None:
        return None
    step_s, who = min(steps)
    if step_s > _WORTH_TELLING * chosen.prediction.step_s:
        return None
    faster = chosen.prediction.step_s / step_s
    return f"If data could move, {who} would take {step_s:.2f} s a step, {faster:.2f}x as fast; as it is, data stay."


def _who(plan: Plan) -> str:
    names = " + ".join(device.name for device in plan.devices)
    return f"{names} alone" if len(plan.devices) == 1 else f"{names} (strategy {plan.strategy})"


def single(task: Task, profile: Profile, owners: Collection[str]) -> Candidate:
    """One device with everything."""
    plan, prediction = planned(task, "single", [profile], [Units(*task.totals)], owners)
    others = sorted(set(owners) - {profile.device})
    reason = missing(prediction)
    if not reason and (len(others) > 1 or (others and profile.device in owners)):
        reason = f"the data of {', '.join(others)} would have to move to {profile.device}."
    elif not reason and others:
        reason = f"{profile.device} is not where this run starts: move the data there and train there alone."
    return Candidate("single", not reason, reason, plan, prediction, moves_data=bool(others))


def _tensor(
    task: Task, profiles: Sequence[Profile], owners: Collection[str], *, time_limit_s: float = 1.2
) -> Candidate:
    if len(profiles) < 2:
        return Candidate("tensor", False, _ONE_DEVICE)
    try:
        found = search(task, profiles, owners, at_least=2, time_limit_s=time_limit_s)
    except NoFit as error:
        return Candidate("tensor", False, str(error))
    group = [profiles[i] for i in found.members]
    plan, prediction = planned(task, "tensor", group, found.units, owners)
    feasible, reason = if_all_on_one(plan, owners)
    return Candidate("tensor", feasible, reason, plan, prediction, found.proven)


def tensor_uniform(task: Task, profiles: Sequence[Profile], owners: Collection[str]) -> Candidate:
    """Even shares of all devices, the remainder to the fastest."""
    if len(profiles) < 2:
        return Candidate("tensor-uniform", False, _ONE_DEVICE)
    fastest_first = sorted(range(len(profiles)), key=lambda i: alone_s(task, profiles[i]))
    place = {device: rank for rank, device in enumerate(fastest_first)}
    shares = [
        Units(*(total // len(profiles) + (place[i] < total % len(profiles)) for total in task.totals))
        for i in range(len(profiles))
    ]
    plan, prediction = planned(task, "tensor-uniform", profiles, shares, owners)
    short = missing(prediction)
    return Candidate("tensor-uniform", not short, short, plan, prediction)


def _pipeline(
    strategy: str, job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], owners: Collection[str]
) -> Candidate:
    if len(profiles) < 2:
        return Candidate(strategy, False, _ONE_DEVICE)
    try:
        found = (best_stages if strategy == "pipeline" else even_stages)(job, decoder, work, profiles, owners)
    except BadInput as error:
        return Candidate(strategy, False, str(error), moves_data=True)
    stages = sorted(found.stages, key=lambda stage: stage.device)
    names = [profiles[stage.device].device for stage in stages]
    devices = stage_devices(decoder, names, [Ranges.of(stage.start, stage.stop) for stage in stages])
    return _of_whole_links(job, strategy, devices, found.prediction, found.micro_batch_size, owners, found.proven)


def _data(job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], owners: Collection[str]) -> Candidate:
    if len(profiles) < 2:
        return Candidate("data", False, _ONE_DEVICE)
    task = task_of(job, decoder, work, owners=len(owners))
    rows = rows_a_turn(job, work, len(owners)) * len(owners)
    if job.data_stays and len(owners) > 1:
        group = tuple(i for i, profile in enumerate(profiles) if profile.device in owners)
        members = [profiles[i] for i in group]
        found = plan_rows(task, members, rows, owners=owners, moved=False, at_once=job.micro_batch_size)
    else:
        group, found = best_rows(task, profiles, rows, owners=owners, at_once=job.micro_batch_size)
    devices = row_devices(decoder, [profiles[i].device for i in group], found.speeds)
    return _of_whole_links(job, "data", devices, found.prediction, found.micro_batch_size, owners)


def _of_embeddings(job: Job, decoder: Decoder, candidate: Candidate, owners: Collection[str]) -> Candidate:
    """The candidate as it is where embeddings are trained."""
    if candidate.plan is None:
        return candidate
    devices = len(candidate.plan.devices)
    moves = moves_all(job, decoder, candidate.strategy, devices) or candidate.moves_data
    reason = why_not(job, decoder, candidate.strategy, devices, len(owners))
    if not reason or not candidate.feasible:
        return replace(candidate, moves_data=moves)
    return replace(candidate, feasible=False, reason=reason, moves_data=moves)


def _of_whole_links(
    job: Job,
    strategy: str,
    devices: tuple[DeviceShare, ...],
    prediction: Prediction,
    micro_batch_size: int,
    owners: Collection[str],
    proven: bool = True,
) -> Candidate:
    """A candidate whose devices hold links whole, and see texts that others have."""
    plan = Plan(strategy, devices, prediction.step_s, prediction.idle_ratio, micro_batch_size=micro_batch_size)
    leaves = what_leaves(devices, sorted(owners))
    reason = missing(prediction) or (forbidden(leaves) if leaves and job.data_stays else "")
    return Candidate(strategy, not reason, reason, plan, prediction, proven, moves_data=bool(leaves))


def planned(
    task: Task, strategy: str, group: Sequence[Profile], shares: Sequence[Units], owners: Collection[str]
) -> tuple[Plan, Prediction]:
    """The plan that gives a group consecutive units, and its prediction."""
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
