"""The best shares where memory binds, as an integer program for HiGHS.

For groups of a given number of devices, choose who takes part (``z``) and units so that the step is shortest:

    T_k >= alpha_ik z_i + beta_ik u_ik        for each segment k and device i
    u_ik <= total_k z_i,  sum_i u_ik = total_k,  sum_i z_i = n
    memory_i(z, u) <= available_i z_i
    e >= m - p T                              what is left of a message when the other half's compute has covered it

All of it is linear once ``n`` is fixed. Memory counts the key/value heads ``k`` that ``h`` query heads touch at most,
``min(K, ceil((h + g - 1) / g))`` in groups of ``g``: two binaries a device, "has heads" and "touches all".
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from potluck.pool.cost import Bools, Costs, Floats, Integers, buffers_bytes
from potluck.pool.sent import messages

_WHOLE_UP_TO = 256
"""More units than this are rounded after the program: one of them is less than 0.4 % of a segment."""
_GAP = 1e-4
_SHORT_LIMIT_S = 0.5
_MIB = float(1 << 20)
_UNITS = ("heads", "columns", "rows")


@dataclass(frozen=True)
class Fitted:
    """What the program found."""

    members_D: Bools | None
    units_D3: Integers | None
    proven: bool
    """Whether the program ran to its end."""
    took_s: float


@dataclass
class _Program:
    """Variables by name, and rows ``low <= sum of coefficients * variables <= high``."""

    places: dict[tuple[str, int], int] = field(default_factory=dict)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)
    rows: list[tuple[Mapping[int, float], float, float]] = field(default_factory=list)

    def variable(self, name: str, i: int = 0, low: float = 0.0, high: float = np.inf, *, whole: bool = False) -> int:
        place = self.places[name, i] = len(self.places)
        self.low.append(low)
        self.high.append(high)
        self.whole.append(whole)
        return place

    def row(self, terms: Mapping[int, float], low: float = -np.inf, high: float = np.inf) -> None:
        self.rows.append((terms, low, high))

    def solve(self, objective: Mapping[int, float], time_limit_s: float, gap: float) -> tuple[Floats | None, bool]:
        """The values found, if any, and whether HiGHS ran to its end."""
        A = np.zeros((len(self.rows), len(self.places)))
        for r, (terms, _, _) in enumerate(self.rows):
            for place, coefficient in terms.items():
                A[r, place] += coefficient
        c = np.zeros(len(self.places))
        for place, coefficient in objective.items():
            c[place] += coefficient
        limits = LinearConstraint(A, [low for _, low, _ in self.rows], [high for _, _, high in self.rows])
        answer = milp(
            c,
            integrality=np.array(self.whole, dtype=np.int64),
            bounds=Bounds(self.low, self.high),
            constraints=limits,
            options={"time_limit": time_limit_s, "mip_rel_gap": gap},
        )
        return None if answer.x is None else np.asarray(answer.x, dtype=np.float64), answer.status in (0, 2)


def fit(costs: Costs, needed_D: Bools, size: int, cutoff_s: float | None, time_limit_s: float) -> Fitted:
    """The shares with the shortest step of any group of ``size`` devices that fit into memory.

    Heads are whole numbers in the program, columns and vocabulary rows too where there are at most 256; otherwise they
    are rounded down after it, and the few that are left go to whoever finishes first and has room. HiGHS stops within
    0.01 % of the optimum where numbers were large.

    Args:
        costs: of all devices.
        needed_D: devices that take part.
        size: devices of the group.
        cutoff_s: only steps shorter than this are of interest.
        time_limit_s: after which the best found so far is taken.
    """
    start = time.perf_counter()
    if size < 2:  # one device has one way to hold everything
        return Fitted(None, None, True, 0.0)
    many = max(costs.task.totals) > _WHOLE_UP_TO
    proven, room_bytes = True, 0.0
    for all_whole in (False, True) if many else (True,):
        for _ in range(2):  # HiGHS may exceed a bound by its tolerance: once more, a little below
            left_s = max(0.05, time_limit_s - (time.perf_counter() - start))
            program, objective = _shortest(costs, needed_D, size, cutoff_s, all_whole, room_bytes)
            values, ended = program.solve(objective, left_s, _GAP if many else 0.0)
            proven = proven and ended
            if values is None:
                return Fitted(None, None, proven, time.perf_counter() - start)
            members_D, units_D3 = _read(program, values, costs)
            rounded_D3 = _filled(costs, members_D, units_D3)
            if rounded_D3 is not None:
                return Fitted(members_D, rounded_D3, proven, time.perf_counter() - start)
            room_bytes += 64.0
    return Fitted(None, None, False, time.perf_counter() - start)


@dataclass(frozen=True)
class Short:
    """Where memory is short, and by how much; where it is not, shares that fit."""

    device: int
    missing_bytes: float
    members_D: Bools
    units_D3: Integers | None = None


def least_missing(costs: Costs, needed_D: Bools, at_least: int) -> Short:
    """The device whose memory is short.

    That is one that must take part and has not even room for what every device holds; otherwise the device with the
    most room. All with any room take part, and what is missing is what it would need beside them.
    """
    empty_D = costs.memory_D + (buffers_bytes(costs.task) if at_least > 1 else 0.0)
    room_D = costs.available_D - empty_D
    needed_room_D = np.where(needed_D, room_D, np.inf)
    members_D = needed_D | (room_D > 0)
    if members_D.sum() < at_least:
        outside_D = np.where(members_D, -np.inf, room_D)
        return Short(int(outside_D.argmax()), float(-outside_D.max()), members_D)
    if needed_room_D.min() < 0:
        device = int(needed_room_D.argmin())
    else:
        device = int(np.where(members_D, room_D, -np.inf).argmax())
    program = _Program()
    size = int(members_D.sum())
    _placed(program, costs, members_D, size, all_whole=False, room_bytes=0.0, short=device, members_D=members_D)
    values, _ = program.solve({program.places["short", 0]: 1.0}, _SHORT_LIMIT_S, _GAP)
    if values is None:  # several lack room: say it of the one that lacks most
        return Short(device, max(1.0, float(-room_D[device])), members_D)
    units_D3 = _filled(costs, *_read(program, values, costs))
    return Short(device, max(1.0, float(values[program.places["short", 0]]) * _MIB), members_D, units_D3)


def _placed(
    program: _Program,
    costs: Costs,
    needed_D: Bools,
    size: int,
    *,
    all_whole: bool,
    room_bytes: float,
    short: int | None = None,
    members_D: Bools | None = None,
) -> None:
    """Variables for who holds what, and the rows that make it complete and fit into memory.

    ``short`` names a device that may exceed its memory, by the variable of that name.
    """
    task, D = costs.task, len(costs.names)
    for i in range(D):
        possible = members_D is None or members_D[i]
        program.variable("z", i, float(needed_D[i]), float(possible), whole=True)
        for name, total in zip(_UNITS, task.totals, strict=True):
            program.variable(name, i, high=total, whole=all_whole or name == "heads" or total <= _WHOLE_UP_TO)
        if task.group > 1:
            program.variable("kv", i, high=task.kv_heads, whole=True)
            program.variable("some", i, high=1, whole=True)
            program.variable("all", i, high=1, whole=True)
    at = program.places
    if short is not None:
        program.variable("short")
    program.row({at["z", i]: 1.0 for i in range(D)}, size, size)
    for name, total in zip(_UNITS, task.totals, strict=True):
        program.row({at[name, i]: 1.0 for i in range(D)}, total, total)
        for i in range(D):
            program.row({at[name, i]: 1.0, at["z", i]: -float(total)}, high=0.0)
    in_flight = buffers_bytes(task) if size > 1 else 0.0
    for i in range(D):
        kv = "heads" if task.group == 1 else "kv"
        room = (costs.memory_D[i] + in_flight - costs.available_D[i] + room_bytes) / _MIB
        terms = {
            at["z", i]: room,
            at["heads", i]: costs.head_bytes_D[i] / _MIB,
            at["columns", i]: costs.column_bytes_D[i] / _MIB,
            at["rows", i]: costs.row_bytes / _MIB,
        }
        terms[at[kv, i]] = terms.get(at[kv, i], 0.0) + costs.kv_bytes / _MIB
        if i == short:
            terms[at["short", 0]] = -1.0
        program.row(terms, high=0.0)
        if task.group > 1:
            g, K = task.group, task.kv_heads
            program.row({at["heads", i]: 1.0, at["some", i]: -float(task.heads)}, high=0.0)
            touched = {at["kv", i]: float(g), at["heads", i]: -1.0, at["some", i]: -(g - 1.0), at["all", i]: float(g)}
            program.row(touched, low=0.0)
            program.row({at["kv", i]: 1.0, at["all", i]: -float(K)}, low=0.0)


def _shortest(
    costs: Costs, needed_D: Bools, size: int, cutoff_s: float | None, all_whole: bool, room_bytes: float
) -> tuple[_Program, dict[int, float]]:
    """The program, with seconds in units of a typical segment, and its objective."""
    task, D, times = costs.task, len(costs.names), costs.times_3
    program = _Program()
    _placed(program, costs, needed_D, size, all_whole=all_whole, room_bytes=room_bytes)
    at = program.places
    unit_s = float((costs.alpha_D3 + costs.beta_D3 * np.array(task.totals) / size).mean())
    sent = messages(task, np.array(float(size)))
    T = [program.variable("T", k) for k in range(3)]
    latency, wire, once = (program.variable(name) for name in ("latency", "wire", "once"))
    bytes_unit = max(float(sent.link_bytes), 1.0)
    once_D = costs.once_D(np.array(float(size)))
    for i in range(D):
        z = at["z", i]
        for k, name in enumerate(_UNITS):
            busy = {at[name, i]: -costs.beta_D3[i, k] / unit_s, z: -costs.alpha_D3[i, k] / unit_s}
            program.row({T[k]: 1.0, **busy}, low=0.0)
        program.row({latency: 1.0, z: -costs.latency_D[i] / unit_s}, low=0.0)
        program.row({wire: 1.0, z: -costs.s_per_byte_D[i] * bytes_unit / unit_s}, low=0.0)
        program.row({once: 1.0, z: -float(once_D[i]) / unit_s}, low=0.0)
    objective = {T[k]: float(times[k]) for k in range(3)}
    objective |= {latency: float(sent.count), wire: float(sent.bytes) / bytes_unit, once: 1.0}
    if task.half_batches == 1:
        sent_alone = float(sum(walks_2.sum() for _, walks_2 in costs.ways))
        objective[latency] += sent_alone
        objective[wire] += sent_alone
    else:
        for way, (part, walks_2) in enumerate(costs.ways):
            for k in range(2):
                left = program.variable("left", 2 * k + way)
                program.row({left: 1.0, T[k]: part, latency: -1.0, wire: -1.0}, low=0.0)
                objective[left] = float(walks_2[k])
        left = program.variable("left", 4)
        program.row({left: 1.0, T[2]: 1.0, latency: -1.0, wire: -float(sent.pair_bytes) / bytes_unit}, low=0.0)
        objective[left] = float(task.micro_batches)
    if cutoff_s is not None:
        program.row(objective, high=cutoff_s / unit_s)
    return program, objective


def _read(program: _Program, values: Floats, costs: Costs) -> tuple[Bools, Floats]:
    D = len(costs.names)
    members_D = np.array([values[program.places["z", i]] > 0.5 for i in range(D)])
    units_D3 = np.array([[values[program.places[name, i]] for name in _UNITS] for i in range(D)])
    return members_D, np.where(members_D[:, None], units_D3, 0.0)


def _filled(costs: Costs, members_D: Bools, units_D3: Floats) -> Integers | None:
    """Whole units, rounded down and filled up by whoever finishes first and has room; None where there is none."""
    world_size = np.array([float(members_D.sum())])
    whole_D3 = np.floor(units_D3 + 1e-5).astype(np.int64)
    for k, total in enumerate(costs.task.totals):
        while whole_D3[:, k].sum() < total:
            one_more = whole_D3.copy()
            one_more[:, k] += 1
            has_room = members_D & (costs.memory(one_more[None], world_size)[0] <= costs.available_D)
            if not has_room.any():
                return None
            finishes = costs.alpha_D3[:, k] + costs.beta_D3[:, k] * one_more[:, k]
            whole_D3[int(np.where(has_room, finishes, np.inf).argmin()), k] += 1
    fits = (costs.memory(whole_D3[None], world_size)[0] <= costs.available_D) | ~members_D
    return whole_D3 if fits.all() and (whole_D3.sum(0) == np.array(costs.task.totals)).all() else None
