"""Which devices make a pipeline, in which order, with which links each, and in micro-batches of how many rows.

Tried are groups of devices that hold the coordinator and all owners, in every order (rank 0 may be any stage), and
every number of rows that makes another number of micro-batches. For each the stages are those of
:mod:`potluck.pool.stage_search`. Of more than six devices only groups that add the fastest one by one are tried,
ordered by speed or by memory (the first stage holds most micro-batches at once), and then neighbours are swapped.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from potluck.errors import BadInput
from potluck.job import Job
from potluck.models.families.decoder import Decoder
from potluck.pool.cost import Integers, Prediction
from potluck.pool.plan import check_micro_batches
from potluck.pool.profile import Profile, Work
from potluck.pool.stage_costs import Stage, StageCosts, predict_stages
from potluck.pool.stage_profiles import rows_a_turn, stage_costs
from potluck.pool.stage_search import Bounds, Budget, improved, shorter_stages, step_s

MOST_IN_EVERY_ORDER = 6
"""Devices up to which every order of every group is tried."""
_WALKS = 200_000
"""Of one search; a walk takes a microsecond or two to simulate."""
_IMPROVED = 6


@dataclass(frozen=True)
class Found:
    """The best stages, in the order of the chain."""

    stages: tuple[Stage, ...]
    costs: StageCosts
    prediction: Prediction
    proven: bool = True
    """Whether no other stages are faster by more than 0.01 %."""

    @property
    def micro_batch_size(self) -> int:
        """Rows of one micro-batch."""
        return self.costs.rows[0]


def best_stages(
    job: Job,
    decoder: Decoder,
    work: Work,
    profiles: Sequence[Profile],
    owners: Collection[str] = (),
    *,
    at_least: int = 2,
) -> Found:
    """The stages with the shortest predicted step that fit into memory; if none fit, those that lack least.

    Args:
        job: its ``micro_batch_size``, if given, decides the rows of a micro-batch.
        decoder: the model's description.
        work: what the devices were measured at.
        profiles: of all devices, coordinator first; two or more.
        owners: names of devices that have data, and take part whatever they cost; the coordinator always among them.
        at_least: how many devices take part.

    Raises:
        BadInput: a link is missing, an adapter's target matches nothing, or a step has too few micro-batches, or the
            model too few links, for that many stages.
    """
    needed = frozenset(i for i, p in enumerate(profiles) if i == 0 or p.device in owners)
    sizes = micro_batch_sizes(job, work, len(needed))
    costs = [stage_costs(job, decoder, work, profiles, owners, rows) for rows in sizes]
    at_least = max(at_least, len(needed))
    possible = _possible(costs, at_least)
    found = _shortest([Bounds(c) for c in possible], needed, at_least)
    return found or _least_missing(possible[-1], needed, at_least)


def even_stages(
    job: Job, decoder: Decoder, work: Work, profiles: Sequence[Profile], owners: Collection[str] = ()
) -> Found:
    """All devices in the order of ranks, with as many links each; what is left goes one by one to the fastest.

    The rows of a micro-batch are those with the shortest step that fits.

    Raises:
        BadInput: a link is missing, an adapter's target matches nothing, or there are more devices than micro-batches
            or links.
    """
    D = len(profiles)
    owning = {profiles[0].device, *owners}
    sizes = micro_batch_sizes(job, work, len(owning))
    costs = [stage_costs(job, decoder, work, profiles, owners, rows) for rows in sizes]
    possible = _possible(costs, D)
    fastest_first = np.argsort(possible[0].seconds_DN1[:, -1], kind="stable").tolist()
    together = decoder.links_together
    whole = costs[0].links // together
    links = [together * (whole // D + (fastest_first.index(d) < whole % D)) for d in range(D)]
    stops = np.cumsum(links).tolist()
    stages = tuple(Stage(d, stop - links[d], stop) for d, stop in enumerate(stops))
    tried = [Found(stages, c, predict_stages(c, stages)) for c in possible]
    return min(tried, key=lambda found: (found.prediction.missing_bytes, found.prediction.step_s))


def micro_batch_sizes(job: Job, work: Work, owners: int) -> list[int]:
    """Rows of a micro-batch to try, falling; of all that make as many micro-batches, the most even."""
    rows = rows_a_turn(job, work, owners)
    if job.micro_batch_size:
        return [min(job.micro_batch_size, rows)]
    return sorted({math.ceil(rows / count) for count in range(1, rows + 1)}, reverse=True)


def _possible(costs: Sequence[StageCosts], stages: int) -> list[StageCosts]:
    """Those with enough micro-batches."""
    finest = costs[-1]
    if finest.links < stages * finest.links_together:
        raise BadInput(
            f"{stages} stages need {'a link' if finest.links_together == 1 else 'a block'} each, and the model has"
            f" {finest.links // finest.links_together}: use fewer devices."
        )
    check_micro_batches(stages, len(finest.rows), finest.rows[0])
    return [each for each in costs if len(each.rows) >= stages]


def _shortest(tables: Sequence[Bounds], needed: frozenset[int], at_least: int) -> Found | None:
    """The shortest of all orders and sizes; of equals, the one with fewer devices and larger micro-batches."""
    orders = sorted(
        (bounds.least_step_s(order) + _group_s(bounds.costs, order), len(order), t, order)
        for t, bounds in enumerate(tables)
        for order in _orders(bounds.costs, needed, at_least)
    )
    guesses = _guesses(tables, orders)
    budget = Budget(_WALKS)
    best_s, best = math.inf, None
    for _, t, stages in guesses[:_IMPROVED]:
        shortest_s, shortest = improved(tables[t], stages, budget)
        shortest_s += _group_s(tables[t].costs, [stage.device for stage in stages])
        if shortest_s < best_s:
            best_s, best = shortest_s, (tables[t].costs, shortest)
    budget = Budget(_WALKS)
    for bound_s, _, t, order in orders:
        if bound_s >= best_s or budget.spent:
            break
        group_s = _group_s(tables[t].costs, order)
        for shorter_s, stages in shorter_stages(tables[t], order, best_s - group_s, budget):
            best_s, best = shorter_s + group_s, (tables[t].costs, stages)
    if best is None:
        return None
    proven = not budget.spent and len(tables[0].costs.names) <= MOST_IN_EVERY_ORDER
    costs, stages = best
    return Found(tuple(stages), costs, predict_stages(costs, stages), proven)


def _guesses(
    tables: Sequence[Bounds], orders: Sequence[tuple[float, int, int, tuple[int, ...]]]
) -> list[tuple[float, int, list[Stage]]]:
    """Steps of the likeliest stages of each order, by length, as far as they are among the best."""
    budget = Budget(_WALKS)
    guesses: list[tuple[float, int, list[Stage]]] = []
    least_s = math.inf
    for bound_s, _, t, order in orders:
        if bound_s >= least_s or budget.spent:
            break
        if (stages := tables[t].first_guess(order)) is not None:
            guess_s = step_s(tables[t].costs, stages, budget) + _group_s(tables[t].costs, order)
            guesses.append((guess_s, t, stages))
            least_s = min(least_s, guess_s)
    return sorted(guesses, key=lambda guess: guess[0])


def _orders(costs: StageCosts, needed: frozenset[int], at_least: int) -> Iterator[tuple[int, ...]]:
    D, most = len(costs.names), min(len(costs.rows), costs.links)
    others = [d for d in range(D) if d not in needed]
    sizes = range(at_least, min(D, most) + 1)
    if D <= MOST_IN_EVERY_ORDER:
        for size in sizes:
            for chosen in combinations(others, size - len(needed)):
                yield from permutations(sorted([*needed, *chosen]))
        return
    speed = costs.seconds_DN1[:, -1]
    others.sort(key=lambda d: float(speed[d]))
    for size in sizes:
        group = [*needed, *others[: size - len(needed)]]
        for key in (speed, -speed, -costs.available_D):
            yield tuple(sorted(group, key=lambda d: float(key[d])))


def _group_s(costs: StageCosts, order: Sequence[int]) -> float:
    return costs.once_s([Stage(d, 0, 0) for d in order])[1]


def _least_missing(costs: StageCosts, needed: frozenset[int], at_least: int) -> Found:
    """The stages that lack least memory where they lack most."""
    M = len(costs.rows)
    least_bytes, least = math.inf, None
    for order in _orders(costs, needed, at_least):
        stops: list[Integers] = []
        short_N1 = np.append(np.full(costs.links, np.inf), 0.0)
        for from_end, d in enumerate(reversed(order), 1):
            short_NN = np.maximum(0.0, costs.memories(d, min(from_end, M)) - costs.available_D[d])
            short_NN[costs.impossible_NN] = np.inf
            most_NN = np.maximum(short_NN, short_N1)
            stops.append(most_NN.argmin(1))
            short_N1 = most_NN.min(1)
        if short_N1[0] < least_bytes:
            least_bytes, start, least = float(short_N1[0]), 0, []
            for d, stop_N1 in zip(order, reversed(stops), strict=True):
                least.append(Stage(d, start, int(stop_N1[start])))
                start = least[-1].stop
    assert least is not None
    return Found(tuple(least), costs, predict_stages(costs, least), proven=False)
