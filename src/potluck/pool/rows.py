"""What a step of the strategy ``data`` costs, and which devices take part.

Each device has the whole model and walks its rows alone, so nothing is waited for until gradients are summed: a step
takes the slowest device's rows, the sum, the optimizer and the new values::

    step = max over devices of part(rows) * (seconds of one measured half-batch through the whole model)
         + max over homes of optimizer + messages

- ``part`` is ``Profile.part_of``: rows by the measured rows, but that walks of few rows take longer than that.
- Every trained tensor has a home, which receives the others' gradients, steps the tensor and broadcasts its values. Of
  ``g`` bytes of gradients each of ``n`` devices sends and receives ``(n - 1) / n * g``; values leave all homes at
  the same time, and of them each device sends and receives as much. A trained embedding is one tensor: where it is more
  than an ``n``-th of all, its home, the first device, has more to do than the others.
- Values and gradients of what is trained are on every device, the optimizer's moments at the home alone.
- Rows are whole. Devices are as fast as their profiles say, and rows as long as the measured ones.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from potluck.errors import BadInput
from potluck.pool.cost import DevicePrediction, Floats, Prediction, costs_of, head_s
from potluck.pool.dealing import deal_rows
from potluck.pool.elements import PerUnit, without
from potluck.pool.profile import Profile
from potluck.pool.reduce import CHUNK_BYTES
from potluck.pool.sent import messages
from potluck.pool.task import ID_BYTES, Tables, Task

_GROUPS_TRIED = 256


@dataclass(frozen=True)
class RowPlan:
    """What ``data`` makes of a group of devices."""

    rows: tuple[int, ...]
    """Of a step, that each device walks, all as long as the measured ones."""
    speeds: tuple[float, ...]
    """Rows a second of each device, by which rows are dealt; 0 for all where each walks the rows it owns."""
    micro_batch_size: int
    """Rows a device walks at once."""
    prediction: Prediction


def plan_rows(
    task: Task,
    profiles: Sequence[Profile],
    rows: int,
    *,
    owners: Collection[str] = (),
    moved: bool = True,
    at_once: int | None = None,
) -> RowPlan:
    """Deal a step's rows to these devices, as many at once as fit into memory, and predict the step.

    At once a device walks no more rows than it was measured at, since their seconds are then known best.

    Args:
        task: the step.
        profiles: of the devices that take part, coordinator first.
        rows: of one step, over all owners.
        owners: names of devices that have data, the coordinator always among them.
        moved: whether rows may go to other devices than their owner's. Otherwise each owner walks an even part.
        at_once: rows that a device walks at once at most, if that is limited.

    Raises:
        BadInput: several devices, and one of them has no link; or rows may not move, and a device owns none.
    """
    owners = {profiles[0].device, *owners}
    speeds = tuple(p.work.rows / float(walk_s) for p, walk_s in zip(profiles, _walk_s_D(task, profiles), strict=True))
    if moved:
        dealt = tuple(len(each) for each in deal_rows([1] * rows, speeds))
    else:
        if idle := [p.device for p in profiles if p.device not in owners]:
            raise BadInput(f"{', '.join(idle)} would have no rows: there are no data on it, and data stay.")
        dealt, speeds = (-(-rows // len(profiles)),) * len(profiles), (0.0,) * len(profiles)
    for size in range(min(profiles[0].work.rows, max(dealt), at_once or max(dealt)), 0, -1):
        prediction = predict_data(task, profiles, dealt, size, owners=owners, moved=moved)
        if size == 1 or all(d.memory_bytes <= d.available_bytes for d in prediction.devices):
            return RowPlan(dealt, speeds, size, prediction)
    raise ValueError(f"a step needs rows, and a device was measured at some: {rows}, {profiles[0].work.rows}")


def best_rows(
    task: Task,
    profiles: Sequence[Profile],
    rows: int,
    *,
    owners: Collection[str] = (),
    at_least: int = 2,
    at_once: int | None = None,
) -> tuple[tuple[int, ...], RowPlan]:
    """The group of devices whose step is shortest where rows may move, and its plan.

    Owners and the coordinator take part. Of the others every group is tried, or, where there are more than 256 groups,
    the fastest one, the fastest two, and so on. If no group fits into memory, the one that lacks least is given.

    Args:
        task: the step.
        profiles: of all devices, coordinator first.
        rows: of one step, over all owners.
        owners: names of devices that have data, the coordinator always among them.
        at_least: devices of the group; fewer only if there are not as many.
        at_once: rows that a device walks at once at most, if that is limited.

    Returns:
        Places in ``profiles``, ascending, and the plan of these devices.

    Raises:
        BadInput: several devices, and one of them has no link.
    """
    needed = [i for i, p in enumerate(profiles) if i == 0 or p.device in owners]
    others = [i for i in range(len(profiles)) if i not in needed]
    found = []
    for chosen in _groups(task, profiles, others):
        if len(needed) + len(chosen) >= min(at_least, len(profiles)):
            group = tuple(sorted([*needed, *chosen]))
            members = [profiles[i] for i in group]
            found.append((group, plan_rows(task, members, rows, owners=owners, at_once=at_once)))
    return min(found, key=lambda each: (each[1].prediction.missing_bytes, each[1].prediction.step_s))


def _groups(task: Task, profiles: Sequence[Profile], others: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if 2 ** len(others) <= _GROUPS_TRIED:
        for size in range(len(others) + 1):
            yield from combinations(others, size)
        return
    walk_s_D = _walk_s_D(task, profiles)
    fastest_first = sorted(others, key=lambda i: walk_s_D[i])
    for size in range(len(others) + 1):
        yield tuple(fastest_first[:size])


def predict_data(
    task: Task,
    profiles: Sequence[Profile],
    rows_D: Sequence[int],
    micro_batch_size: int,
    *,
    owners: Collection[str] = (),
    moved: bool = True,
) -> Prediction:
    """What a step of ``data`` is expected to take; see the module's text.

    Args:
        task: the step; its micro-batches and half-batches are those of other strategies and are not looked at.
        profiles: of the devices that take part, coordinator first.
        rows_D: rows of a step that each device walks.
        micro_batch_size: rows that a device walks at once; activations are those of so many.
        owners: names of devices that have data, the coordinator always among them.
        moved: whether rows are dealt to devices that may not own them, and so are sent.

    Raises:
        BadInput: several devices, and one of them has no link.
    """
    work, n = profiles[0].work, len(profiles)
    one_tensor = task.trained.vocab_row * task.vocab_rows + task.tables.elements
    task = _with_tables(task)
    stepped_D = _stepped(_of_whole(task.trained, task), one_tensor, n)
    owners = {profiles[0].device, *owners}
    parts_D = [_parts(p, rows, micro_batch_size) for p, rows in zip(profiles, rows_D, strict=True)]
    walk_s_D = np.array(parts_D) * _walk_s_D(task, profiles)
    once_s_D = np.array([p.optimizer_s(elements) for p, elements in zip(profiles, stepped_D, strict=True)])
    compute_s_D = walk_s_D + once_s_D
    busiest_s = float(walk_s_D.max() + once_s_D.max())

    exact = 8 if work.dtype == "fp64" else 4
    gradient_bytes = _of_whole(task.trained, task) * exact
    moments_bytes = task.stepped_bytes - 2 * exact  # beside value and gradient
    row_bytes = (work.length + work.supervised / work.rows) * ID_BYTES if moved else 0.0
    rows = sum(rows_D)
    moved_D = [
        (rows / len(owners)) * (1 - each / rows) * (p.device in owners)
        for p, each in zip(profiles, rows_D, strict=True)
    ]
    costs = costs_of(_alone(task, micro_batch_size / work.rows, moments_bytes), profiles, owners)
    message_s = 0.0
    if n > 1:
        # sums that only their homes need send half of what an all-reduce does
        wire_bytes = n * exact * float(stepped_D.max())
        summed = replace(task, micro_batches=0, partial_bytes=wire_bytes / 2, kv_trained_bytes=0.0)
        sent = messages(replace(summed, whole_bytes=wire_bytes), np.array(float(n)))
        count = sent.count + 2 * (len(owners) - 1) + bool(row_bytes)
        carried = sent.bytes + sum(moved_D) * row_bytes
        message_s = float(count * costs.latency_D.max() + carried * costs.s_per_byte_D.max())
    whole_MD3 = np.broadcast_to(np.array(task.totals, dtype=np.int64), (1, n, 3))
    memory_D = costs.memory(whole_MD3, np.ones(1))[0] + 2 * exact * stepped_D + _reducing_bytes(gradient_bytes, n)
    at_home_D = exact * stepped_D
    sent_D = (gradient_bytes - at_home_D) * np.array([bool(rows) for rows in rows_D]) + (n - 1) * at_home_D
    devices = tuple(
        DevicePrediction(
            name=p.device,
            compute_s=float(compute_s_D[i]),
            wait_s=busiest_s - float(compute_s_D[i]),
            memory_bytes=float(memory_D[i]),
            available_bytes=float(costs.available_D[i]),
            bytes_sent=float(sent_D[i]) + moved_D[i] * row_bytes,
        )
        for i, p in enumerate(profiles)
    )
    step_s = busiest_s + message_s
    return Prediction(step_s, sum(d.wait_s for d in devices) / (n * step_s) if step_s else 0.0, message_s, devices)


def _walk_s_D(task: Task, profiles: Sequence[Profile]) -> Floats:
    """Seconds in which each device walks one measured half-batch through the whole model, both ways."""
    return np.array(
        [
            np.dot(task.both_ways(p.forward_part), (p.attention_s(task.heads), p.mlp_s(task.columns)))
            + head_s(task, p)(task.vocab_rows)
            for p in profiles
        ]
    )


def _parts(profile: Profile, rows: int, at_once: int) -> float:
    """Seconds of walks of ``rows`` rows, as a part of those of one measured half-batch."""
    walks, rest = divmod(rows, at_once)
    return walks * profile.part_of(at_once) + (profile.part_of(rest) if rest else 0.0)


def _of_whole(amounts: PerUnit, task: Task) -> float:
    """All units of the model together."""
    units = task.heads * amounts.head + task.kv_heads * amounts.kv_head + task.columns * amounts.column
    return units + task.vocab_rows * amounts.vocab_row + amounts.replicated


def _with_tables(task: Task) -> Task:
    """The task with trained embeddings as every device has them whole."""
    tables, weights, trained = task.tables, task.weights, task.trained
    return replace(
        task,
        tables=Tables(),
        weights=replace(weights, replicated=weights.replicated + tables.bytes),
        trained=replace(trained, replicated=trained.replicated + tables.elements),
    )


def _stepped(elements: float, one_tensor: float, n: int) -> Floats:
    """Elements whose home each of ``n`` devices is: about as many, but that the first has the largest tensor."""
    first = max(elements / n, one_tensor)
    return np.array([first, *[(elements - first) / max(n - 1, 1)] * (n - 1)])


def _alone(task: Task, part: float, less: float) -> Task:
    """The task as a device sees it that walks ``part`` of a measured half-batch at once, with everything in one graph.

    ``less`` is what the optimizer keeps at the homes, bytes of a trained element: it is not in its memory.
    """
    return replace(
        task,
        half_batches=1,
        longest_part=task.longest_part * part,
        kept_bytes=task.kept_bytes * part,
        head_work_bytes=task.head_work_bytes * max(1.0, part / task.half_batches),
        weights=without(task.weights, task.trained, less),
    )


def _reducing_bytes(gradient_bytes: float, n: int) -> float:
    """Chunks in flight: of gradients two each way with each other device; of values, later, two of each home."""
    return 4 * (n - 1) * min(CHUNK_BYTES, gradient_bytes / n)
