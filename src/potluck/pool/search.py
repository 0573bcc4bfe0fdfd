"""The best shares over all groups of devices: exact where memory leaves room, an integer program where it does not.

For one group, each segment is a min-max of its own: give every next unit to the device that would finish first. In
closed form, the continuous water level (:func:`water_level`) is found first; whole units below it are a prefix of that
greedy order, and fewer units than devices are left to give one by one. The water level also bounds a group from below,
so groups are tried in the order of their bounds until the bound passes the best step found.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from potluck.errors import BadInput
from potluck.pool.cost import Bools, Costs, Floats, Integers, Units, costs_of
from potluck.pool.fitting import fit, least_missing
from potluck.pool.profile import Profile
from potluck.pool.task import Task

MOST_IN_EVERY_GROUP = 16
"""Devices up to which every group is tried."""
_AT_ONCE = 1024
_SAME_S = 1e-12


class NoFit(BadInput):
    """The model does not fit into the devices' memory."""

    def __init__(self, device: str, missing_bytes: float) -> None:
        """Say how much is missing, and where."""
        super().__init__(
            f"The model does not fit: {missing_bytes / 2**30:.2f} GiB are missing on {device}. Free memory there, add "
            "a device, or try checkpointing: true, a smaller micro_batch_size or data.max_length."
        )
        self.device, self.missing_bytes = device, missing_bytes


@dataclass(frozen=True)
class Found:
    """The best shares, and of which devices."""

    members: tuple[int, ...]
    """Places in the profiles searched, ascending."""
    units: tuple[Units, ...]
    """Of each member."""
    step_s: float
    proven: bool = True
    """Whether no other shares are faster; False where the integer program ran out of time."""


def search(
    task: Task, profiles: Sequence[Profile], must: Collection[str], *, at_least: int = 1, time_limit_s: float = 1.2
) -> Found:
    """The shares with the shortest predicted step that fit into memory.

    Every group of devices that holds the coordinator and ``must`` is considered, up to 16 devices; of more, only the
    groups that add the fastest others one by one. Where memory binds, vocabulary rows and columns are whole numbers
    only after rounding if there are many of them (see :func:`potluck.pool.fitting.fit`).

    Args:
        task: the step.
        profiles: of all devices, coordinator first, names distinct.
        must: names of devices that take part whatever they cost: owners.
        at_least: how many devices take part.
        time_limit_s: for the integer programs together.

    Raises:
        NoFit: memory is short in every group.
        BadInput: a link is missing.
    """
    costs = costs_of(task, profiles, must)
    needed = np.array([i == 0 or name in must for i, name in enumerate(costs.names)])
    members_GD = _groups(costs, needed)
    members_GD = members_GD[members_GD.sum(1) >= at_least]
    bound_G = costs.steps(members_GD, np.stack([w.max(1) for w in _levels(costs, members_GD)], 1))[0]
    members_GD, bound_G = _sorted_by(bound_G, members_GD)
    best: Found | None = None
    crowded: dict[int, float] = {}
    for start in range(0, len(bound_G), _AT_ONCE):
        if best is not None and bound_G[start] >= best.step_s:
            break
        batch_MD = members_GD[start : start + _AT_ONCE]
        units_MD3 = shares_of(costs, batch_MD)
        step_M, _ = costs.steps(batch_MD, costs.segments(batch_MD, units_MD3))
        sizes_M = batch_MD.sum(1)
        fits_M = (~batch_MD | (costs.memory(units_MD3, sizes_M.astype(np.float64)) <= costs.available_D)).all(1)
        for size in np.unique(sizes_M[~fits_M]):
            crowded[int(size)] = min(crowded.get(int(size), np.inf), float(step_M[~fits_M & (sizes_M == size)].min()))
        if fits_M.any():
            i = int(np.where(fits_M, step_M, np.inf).argmin())
            if best is None or step_M[i] < best.step_s - _SAME_S:
                best = _found(batch_MD[i], units_MD3[i], float(step_M[i]))
    best = _with_memory_bound(costs, needed, crowded, best, time_limit_s)
    if best is not None:
        return best
    short = least_missing(costs, needed, at_least)
    if short.units_D3 is None:
        raise NoFit(costs.names[short.device], short.missing_bytes)
    members_MD, units_MD3 = short.members_D[None], short.units_D3[None]
    step_M, _ = costs.steps(members_MD, costs.segments(members_MD, units_MD3))
    return _found(short.members_D, short.units_D3, float(step_M[0]), proven=False)


def shares_of(costs: Costs, members_MD: Bools) -> Integers:
    """``[M, D, 3]``: for each group, the units with the shortest segments; memory is not looked at.

    Of devices that would finish a unit at the same time, the faster one takes it.
    """
    units = [
        _shared_out(costs.alpha_D3[:, k], costs.beta_D3[:, k], members_MD, level_MD, total)
        for k, (level_MD, total) in enumerate(zip(_levels(costs, members_MD), costs.task.totals, strict=True))
    ]
    return np.stack(units, -1)


def water_level(alpha_D: Floats, beta_D: Floats, members_MD: Bools, total: int) -> Floats:
    """``[M]``: the time at which each group would have done ``total`` units, could units be cut.

    It solves ``sum over members of max(0, level - alpha) / beta = total``: members whose ``alpha`` lies above the level
    are taken out until there are none. The slowest member finishes at ``max(level, max alpha)``. Without units, it is
    the time of the member with the least ``alpha``.
    """
    if total == 0:
        return np.asarray(np.where(members_MD, alpha_D, np.inf).min(1))
    active_MD = members_MD
    while True:
        speed_MD = np.where(active_MD, 1 / beta_D, 0.0)
        level_M = (total + speed_MD @ alpha_D) / speed_MD.sum(1)
        still_MD = active_MD & (alpha_D < level_M[:, None])
        if (still_MD == active_MD).all():
            return np.asarray(level_M)
        active_MD = still_MD


def _levels(costs: Costs, members_MD: Bools) -> list[Floats]:
    """For each segment ``[M, D]``, the time up to which each member is busy in the continuous optimum."""
    levels = []
    for k, total in enumerate(costs.task.totals):
        alpha_D, beta_D = costs.alpha_D3[:, k], costs.beta_D3[:, k]
        level_M = water_level(alpha_D, beta_D, members_MD, total)
        levels.append(np.where(members_MD, np.maximum(level_M[:, None], alpha_D), 0.0))
    return levels


def _shared_out(alpha_D: Floats, beta_D: Floats, members_MD: Bools, level_MD: Floats, total: int) -> Integers:
    fast_first = np.lexsort((alpha_D, beta_D))  # argmin below takes the first of equals
    alpha, beta, members = alpha_D[fast_first], beta_D[fast_first], members_MD[:, fast_first]
    busy = np.where(members, level_MD[:, fast_first] - alpha, 0.0) / beta
    units = np.minimum(busy, total).astype(np.int64)
    rows = np.arange(len(units))
    while (over := np.flatnonzero(units.sum(1) > total)).size:  # the level was rounded up
        last = np.where(units[over] > 0, alpha + beta * units[over], -np.inf).argmax(1)
        units[over, last] -= 1
    while (rest := rows[units.sum(1) < total]).size:
        first = np.where(members[rest], alpha + beta * (units[rest] + 1), np.inf).argmin(1)
        units[rest, first] += 1
    shared = np.empty_like(units)
    shared[:, fast_first] = units
    return shared


def _groups(costs: Costs, needed_D: Bools) -> Bools:
    """``[G, D]``: the groups to try."""
    optional = np.flatnonzero(~needed_D)
    if len(needed_D) <= MOST_IN_EVERY_GROUP:
        chosen = (np.arange(1 << len(optional))[:, None] >> np.arange(len(optional)) & 1).astype(np.bool_)
    else:
        whole_s = (costs.alpha_D3 + costs.beta_D3 * np.array(costs.task.totals)) @ costs.times_3
        place = np.argsort(np.argsort(whole_s[optional], kind="stable"), kind="stable")
        chosen = place < np.arange(len(optional) + 1)[:, None]
    groups = np.tile(needed_D, (len(chosen), 1))
    groups[:, optional] = chosen
    return groups


def _sorted_by(bound_G: Floats, members_GD: Bools) -> tuple[Bools, Floats]:
    order = np.lexsort((members_GD.sum(1), bound_G))
    return members_GD[order], bound_G[order]


def _found(members_D: Bools, units_D3: Integers, step_s: float, *, proven: bool = True) -> Found:
    members = tuple(int(i) for i in np.flatnonzero(members_D))
    return Found(members, tuple(Units(*(int(u) for u in units_D3[i])) for i in members), step_s, proven)


def _with_memory_bound(
    costs: Costs, needed_D: Bools, crowded: dict[int, float], best: Found | None, time_limit_s: float
) -> Found | None:
    """The best of ``best`` and of the groups that would be faster but for their memory."""
    left_s, proven = time_limit_s, True
    for size, bound_s in _by_bound(crowded):
        if best is not None and bound_s >= best.step_s:
            continue
        fitted = fit(costs, needed_D, size, None if best is None else best.step_s, left_s)
        left_s = max(0.05, left_s - fitted.took_s)
        proven = proven and fitted.proven
        if fitted.members_D is not None and fitted.units_D3 is not None:
            units_MD3, members_MD = fitted.units_D3[None], fitted.members_D[None]
            step_s = float(costs.steps(members_MD, costs.segments(members_MD, units_MD3))[0][0])
            if best is None or step_s < best.step_s:
                best = _found(fitted.members_D, fitted.units_D3, step_s)
    return None if best is None else Found(best.members, best.units, best.step_s, proven and best.proven)


def _by_bound(crowded: dict[int, float]) -> Iterator[tuple[int, float]]:
    yield from sorted(crowded.items(), key=lambda item: item[1])
