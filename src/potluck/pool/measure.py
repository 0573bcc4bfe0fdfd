"""Measuring this device: seconds and bytes by units, for one half-batch of a job's work.

It is done in a device's own process (:mod:`potluck.pool.device`), which an instruction that the processor lacks ends
alone, and whose memory is that of a device.
"""

import gc
import hashlib
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from scipy.optimize import nnls

from potluck.chain.pace import Pace
from potluck.errors import BadInput
from potluck.job_sections import OptimizerName
from potluck.models.cache import user_cache
from potluck.models.families.decoder import Decoder
from potluck.models.memory import memory_mib, trim
from potluck.models.optimizer import optimizer_of
from potluck.models.precision import torch_dtype
from potluck.pool.laps import HEAD_WALKS, Round, Samples, Stopwatch, kept_bytes, make_samples, walk_round
from potluck.pool.machine import available_bytes, forget_peak, machine_of
from potluck.pool.measured_work import decoder_of_work
from potluck.pool.profile import Line, Machine, Profile, Work, parse_profile, write_profile

BUDGET_S = 10.0
"""For all rounds, once there are ``_WANTED_ROUNDS``."""

_LONGEST_S = 25.0
"""For those of a slow device; one that is too slow for full shares is measured at smaller ones."""
_WANTED_ROUNDS = 6

_PARTS = (0.0, 1 / 6, 2 / 3)
_VOCAB_PARTS = (1 / 6, 1 / 2)
_LARGEST_PARTS = (1.0, 3 / 4, 1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 8)
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 25
_TENSORS = (128, 512)
_LARGEST_TENSOR = 1 << 13
_REVISION = 2
"""Of what is measured, and how: profiles kept from before are of another."""
_GROWTH_BYTES = 64 << 20
"""By which a device that sees batches of many shapes outgrows this process: its heap has more holes. (Of oneDNN's
kernels, in bf16 a set for every shape, this process has as many sets as shares are measured.)"""


def measure(
    work: Work,
    *,
    device: str,
    threads: int,
    pace: Pace | None = None,
    cache: Path | None = None,
    fresh: bool = False,
) -> Profile:
    """What this machine's time and memory are for ``work``, with weights of real shapes but random values.

    Args:
        work: the half-batch, model and kind of training.
        device: name of the device.
        threads: threads it computes with.
        pace: of an emulated device, which measures itself as slow as it is.
        cache: directory of what was measured before; the user's cache if left out. Available memory is never cached.
        fresh: measure again what was measured before, and keep that.

    Returns:
        The profile, without a link.

    Raises:
        BadInput: the work's model or its adapters cannot be used.
    """
    cache = cache or user_cache() / "profiles"
    machine = machine_of(threads)
    kept_at = cache / f"{_key(work, machine, pace)}.json"
    known = None if fresh else _known(kept_at, work)
    if known is not None:
        return known.model_copy(update={"device": device, "available_bytes": available_bytes()})
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        profile = _measured(work, device, machine, pace)
    finally:
        torch.set_num_threads(before)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        write_profile(profile, kept_at)
    except (OSError, BadInput):
        pass  # it will be measured again
    return profile


def _measured(work: Work, device: str, machine: Machine, pace: Pace | None) -> Profile:
    from potluck import __version__

    model = decoder_of_work(work)
    part = _largest_part(work, model, pace)
    attention, mlp = _counts(model.num_heads, _of_heads(part)), _counts(model.intermediate_size, part)
    vocab_rows = sorted({max(1, round(model.head_rows * part * p)) for p in _VOCAB_PARTS}) if model.head_rows else [0]
    samples = make_samples(work, attention, mlp, vocab_rows)
    kept = kept_bytes(samples)
    rounds, peak_bytes = _timed(samples, pace)
    one_row_part = _one_row_part(samples, rounds, pace)
    places = list(dict.fromkeys(samples.places))
    forward_s = {place: _typical(rounds, [r.forward_s[place] for r in rounds]) for place in places}
    both_s = {place: _typical(rounds, [r.forward_s[place] + r.backward_s[place] for r in rounds]) for place in places}
    head_s = [(rows, _typical(rounds, [r.head_s[rows] for r in rounds])) for rows in vocab_rows]
    largest = samples.places[-2:]
    optimizer_s = _optimizer_s([t.local.numel() for t in samples.chain.trained], work.optimizer, pace)
    held_bytes = samples.weight_bytes + _held_bytes(samples, kept)
    del samples
    gc.collect()
    trim()
    now_bytes = int(memory_mib("VmRSS") * 2**20)
    return Profile(
        potluck=__version__,
        torch=torch.__version__,
        device=device,
        machine=machine,
        work=work,
        attention_s=fit([(units, both_s[kind, units]) for kind, units in places if kind == "attention"]),
        mlp_s=fit([(units, both_s[kind, units]) for kind, units in places if kind == "mlp"]),
        head_s=fit(head_s),
        forward_part=sum(forward_s[place] for place in largest) / sum(both_s[place] for place in largest),
        one_row_part=one_row_part,
        optimizer_s=optimizer_s,
        attention_bytes=fit([(units, kept[kind, units]) for kind, units in places if kind == "attention"]),
        mlp_bytes=fit([(units, kept[kind, units]) for kind, units in places if kind == "mlp"]),
        runtime_bytes=max(peak_bytes - held_bytes, now_bytes) + _GROWTH_BYTES,
        available_bytes=available_bytes(),
    )


def fit(points: Sequence[tuple[int, float]]) -> Line:
    """The line with ``alpha >= 0`` and ``beta >= 0`` nearest to the points, by weighted squares.

    A square counts by the inverse of its point's value: between absolute distances, which would leave small shares to
    the errors of large ones, and relative ones, by which an empty share would decide the slope.
    """
    units, values = np.array(points, dtype=np.float64).T
    scale = 1 / np.sqrt(np.maximum(values, 1e-3 * max(values.max(), 1e-12)))
    largest = max(float(units.max()), 1.0)
    (alpha, beta), _ = nnls(np.stack((scale, scale * units / largest), axis=1), scale * values)
    return Line(alpha=float(alpha), beta=float(beta) / largest, points=tuple(points))


def _typical(rounds: Sequence[Round], seconds: Sequence[float]) -> float:
    """Of seconds in each round: what slows the machine for a while slows a whole round, and no place's part of it."""
    rounds_s = [_seconds(each) for each in rounds]
    return median(rounds_s) * median(s / round_s for s, round_s in zip(seconds, rounds_s, strict=True))


def _counts(units: int, part: float) -> list[int]:
    """From none to ``part`` of the units; alike in number for all kinds of units, so perhaps with repetitions."""
    return [round(max(1, units * part) * p) for p in _PARTS]


def _of_heads(part: float) -> float:
    """Attention is the smaller part of a block, so that more of it can be measured, as its coarser units need."""
    return min(1.0, 2 * part)


def _timed(samples: Samples, pace: Pace | None) -> tuple[list[Round], int]:
    """Rounds within the budget after one to warm up, and this process's largest resident memory in them, bytes."""
    start = time.perf_counter()
    walk_round(samples, pace)
    forget_peak()
    rounds: list[Round] = []
    while len(rounds) < _MOST_ROUNDS:
        round_s = (time.perf_counter() - start) / (len(rounds) + 1)
        budget_s = BUDGET_S if len(rounds) >= _WANTED_ROUNDS else max(BUDGET_S, _LONGEST_S)
        if len(rounds) >= _LEAST_ROUNDS and time.perf_counter() - start + round_s > budget_s:
            break
        rounds.append(walk_round(samples, pace))
    return rounds, int(memory_mib("VmHWM") * 2**20)


def _one_row_part(samples: Samples, rounds: Sequence[Round], pace: Pace | None) -> float | None:
    """See :class:`potluck.pool.profile.Profile`; never less than a row's part of the rows."""
    rows, supervised = len(samples.x_BSD), len(samples.supervised_N)
    if rows == 1:
        return None
    S = samples.x_BSD.shape[1]
    N = max(1, supervised // rows)
    one = replace(samples, x_BSD=samples.x_BSD[:1], supervised_N=torch.arange(N) * S // N)
    walk_round(one, pace)
    one_s = median(_seconds(walk_round(one, pace)) for _ in range(_LEAST_ROUNDS))
    return min(1.0, max(1 / rows, one_s / median(_seconds(each) for each in rounds)))


def _seconds(each: Round) -> float:
    return sum(each.forward_s.values()) + sum(each.backward_s.values()) + sum(each.head_s.values())


def _held_bytes(samples: Samples, kept: Mapping[tuple[str, int], int]) -> int:
    """What training accounts for beside the weights at the height of a round: two tapes, and gradients."""
    empty = kept["attention", 0] + kept["mlp", 0]
    tapes = 2 * (sum(kept[place] for place in samples.places) + 2 * empty)
    return tapes + sum(t.local.nbytes for t in samples.chain.trained)


def _largest_part(work: Work, model: Decoder, pace: Pace | None) -> float:
    """The largest part of the MLP's units and vocabulary rows that this machine can hold, and can walk in time."""
    D, K, F, V = model.hidden_size, model.head_dim, model.intermediate_size, model.head_rows
    compute = torch_dtype(work.dtype)
    M, walks = work.rows * work.length, 3 if work.train == "full" else 2
    operation_s = _seconds_per_operation(M, D, min(F, 2048), compute, pace)
    itemsize = max(compute.itemsize, 4) if work.train == "full" else compute.itemsize
    available = available_bytes()
    for part in _LARGEST_PARTS:
        of_attention, of_mlp = 2 * D * K * (model.num_heads + model.num_kv_heads), 3 * D * F
        elements = sum(_PARTS) * (_of_heads(part) * of_attention + part * of_mlp)
        head_walks = 4 * HEAD_WALKS * work.supervised * V * D * sum(_VOCAB_PARTS) * part
        round_s = 1.5 * operation_s * (2 * (2 * walks * M * elements) + head_walks)
        # A copy is alive while linears are joined; gradients of full training are as large as weights.
        needed = (elements * (3 if work.train == "full" else 1.5) + part * V * D) * itemsize
        if needed <= available / 2 and round_s <= _LONGEST_S / (_WANTED_ROUNDS + 1):
            return part
    return _LARGEST_PARTS[-1] / 2


def _seconds_per_operation(M: int, I: int, O: int, dtype: torch.dtype, pace: Pace | None) -> float:  # noqa: E741
    x_MI, W_OI = torch.ones(M, I, dtype=dtype), torch.ones(O, I, dtype=dtype)
    watch = Stopwatch(pace)
    seconds = []
    for _ in range(3):
        watch.start()
        torch.nn.functional.linear(x_MI, W_OI)
        seconds.append(watch.lap())
    return min(seconds) / (2 * M * I * O)


def _optimizer_s(sizes: Sequence[int], kind: OptimizerName, pace: Pace | None) -> Line:
    """An update's seconds (norm, clipping, optimizer) by elements, in tensors of these sizes in turn."""
    usual = [min(size, _LARGEST_TENSOR) for size in sizes if size] or [_LARGEST_TENSOR]
    points = []
    for count in _TENSORS:
        tensors = [torch.zeros(size) for size in itertools.islice(itertools.cycle(usual), count)]
        for tensor in tensors:
            tensor.grad = torch.full_like(tensor, 1e-3)
        gradients = [tensor.grad for tensor in tensors if tensor.grad is not None]
        optimizer = optimizer_of(tensors, kind, 0.0)
        assert optimizer is not None
        watch = Stopwatch(pace)
        seconds = []
        for _ in range(8):
            watch.start()
            torch._foreach_norm(gradients)
            torch._foreach_mul_(gradients, 0.999)
            optimizer.step(1e-4)
            seconds.append(watch.lap())
        points.append((sum(tensor.numel() for tensor in tensors), median(seconds[1:])))
    return fit(points)


def _key(work: Work, machine: Machine, pace: Pace | None) -> str:
    from potluck import __version__

    what = [work.model_dump(mode="json"), machine.model_dump(), __version__, torch.__version__, _REVISION]
    speed = None if pace is None else pace.speed
    return hashlib.sha256(json.dumps([*what, speed], sort_keys=True).encode()).hexdigest()[:32]


def _known(file: Path, work: Work) -> Profile | None:
    """What was measured before; None where there is nothing, or nothing that can be read."""
    try:
        profile = parse_profile(json.loads(file.read_text(encoding="utf-8")), where=str(file))
    except (OSError, ValueError, BadInput):
        return None
    return profile if profile.work == work else None
