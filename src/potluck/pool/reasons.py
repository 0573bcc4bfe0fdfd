"""Why a plan is as it is, in sentences."""

from collections.abc import Collection, Sequence

import numpy as np

from potluck.pool.cost import Costs, Prediction, costs_of
from potluck.pool.plan import Plan, listed
from potluck.pool.profile import Profile
from potluck.pool.search import shares_of
from potluck.pool.task import Task

_FULL = 0.97
_MENTIONED = 3
_EVEN = {"tensor-uniform": "shares", "pipeline-uniform": "stages"}


def alone_s(task: Task, profile: Profile) -> float:
    """Seconds in which a device would compute a whole step; memory is not looked at."""
    costs = costs_of(task, [profile], ())
    return float(((costs.alpha_D3 + costs.beta_D3 * np.array(task.totals)) @ costs.times_3)[0])


def missing(prediction: Prediction) -> str:
    """What memory is missing where it is missing most; empty if nothing is."""
    device = max(prediction.devices, key=lambda d: d.memory_bytes - d.available_bytes)
    short_bytes = device.memory_bytes - device.available_bytes
    if short_bytes <= 0:
        return ""
    return (
        f"{short_bytes / 2**30:.2f} GiB are missing on {device.name}: {device.memory_bytes / 2**30:.2f} GiB are"
        f" needed, {device.available_bytes / 2**30:.2f} GiB are there."
    )


def if_all_on_one(plan: Plan, owners: Collection[str]) -> tuple[bool, str]:
    """Whether a plan for several devices is worth the name, and what to do where one device would hold everything."""
    holders = [d.name for d in plan.devices if len(d.heads) or len(d.columns) or len(d.vocab_rows)]
    if len(holders) > 1:
        return True, ""
    if set(owners) == set(holders):
        return False, f"every share would go to {holders[0]}: train there alone (strategy: single)."
    return True, f"every share goes to {holders[0]}: with the data there, it would better train alone."


def too_slow(prediction: Prediction, chosen: Prediction) -> str:
    """How a plan compares with the best."""
    ratio = prediction.step_s / chosen.step_s
    return f"{ratio:.1f}x as long as the best." if ratio >= 2 else f"{ratio - 1:.0%} slower than the best."


def why(task: Task, profiles: Sequence[Profile], plan: Plan, prediction: Prediction) -> str:
    """Why these devices, and why these shares."""
    by_name = {profile.device: profile for profile in profiles}
    took_s = {device.name: alone_s(task, by_name[device.name]) for device in plan.devices}
    said = []
    fastest, slowest = min(took_s, key=took_s.__getitem__), max(took_s, key=took_s.__getitem__)
    if len(plan.devices) == 1:
        said.append(f"{fastest} trains alone, without messages.")
    elif plan.strategy in _EVEN:
        said.append(f"All {len(plan.devices)} devices take even {_EVEN[plan.strategy]}.")
    else:
        ratio = took_s[slowest] / took_s[fastest]
        if ratio < 1.02:
            said.append("All devices compute about equally fast.")
        else:
            takes = _takes(task, plan, fastest, slowest)
            said.append(f"{fastest} computes {ratio:.1f}x as fast as {slowest} and {takes}.")
        full = [d.name for d in prediction.devices if d.memory_bytes > _FULL * d.available_bytes]
        if full:
            said.append(f"The memory of {listed(full)} is full, so others take more.")
    if len(plan.devices) > 1:
        said.append(
            f"Messages take {prediction.message_s / prediction.step_s:.0%} of the step beyond what compute covers, "
            f"waiting {prediction.idle_ratio:.0%}."
        )
    if plan.strategy in ("single", "tensor"):
        said += _left_out(task, profiles, plan, prediction)
    elif left_out := [profile.device for profile in profiles if profile.device not in took_s]:
        own_rows = plan.strategy == "data" and not any(device.speed for device in plan.devices)
        without = f"{listed(left_out)} {'have' if len(left_out) > 1 else 'has'} no data, and data stay."
        said.append(without if own_rows else f"With {listed(left_out)} it would not be faster.")
    return " ".join(said)


def _takes(task: Task, plan: Plan, fastest: str, slowest: str) -> str:
    """What the fastest and the slowest device take, in the units of the strategy."""
    devices = {device.name: device for device in plan.devices}
    one, other = devices[fastest], devices[slowest]
    if one.links is not None and other.links is not None:
        (many, few) = (f"{len(d.links or ()) / 2:g}{' (and the head)' if d.vocab_rows else ''}" for d in (one, other))
        rows = "1 row" if plan.micro_batch_size == 1 else f"{plan.micro_batch_size} rows"
        return f"takes {many} of the {task.layers} blocks, {slowest} {few}, in micro-batches of {rows}"
    if plan.strategy == "data":
        speeds = sum(device.speed for device in plan.devices)
        if not speeds:
            return "each walks its own rows"
        return f"takes {one.speed / speeds:.0%} of the rows, {slowest} {other.speed / speeds:.0%}"
    return f"takes {len(one.heads)} of {task.heads} query heads, {slowest} {len(other.heads)}"


def _left_out(task: Task, profiles: Sequence[Profile], plan: Plan, prediction: Prediction) -> list[str]:
    """What each device that has no part would have made of the step."""
    held = {device.name for device in plan.devices}
    costs = costs_of(task, profiles, ())
    slower: list[tuple[float, str]] = []
    crowded: list[str] = []
    for i, name in enumerate(costs.names):
        if name not in held:
            step_s = _step_with(costs, [n in held or k == i for k, n in enumerate(costs.names)])
            if step_s >= prediction.step_s:
                slower.append((step_s, name))
            else:
                crowded.append(name)
    said = []
    for step_s, name in sorted(slower)[:_MENTIONED]:
        said.append(
            f"{name} is left out: with it a step would take {step_s:.2f} s instead of {prediction.step_s:.2f} s."
        )
    if len(slower) > _MENTIONED:
        said.append(f"So are {len(slower) - _MENTIONED} more.")
    if crowded and plan.strategy == "tensor":
        said.append(f"{listed(crowded)} {'are' if len(crowded) > 1 else 'is'} left out for want of memory.")
    return said


def _step_with(costs: Costs, members: Sequence[bool]) -> float:
    members_MD = np.array([members])
    units_MD3 = shares_of(costs, members_MD)
    return float(costs.steps(members_MD, costs.segments(members_MD, units_MD3))[0][0])
