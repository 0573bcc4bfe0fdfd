"""What runs of ``bench pool`` said, made up: two rows of two devices, step by step."""

from typing import Any

from potluck.bench.pool_plans import Entry, job_of
from potluck.bench.pool_run import Step
from potluck.chain.ranges import Ranges
from potluck.pool.cost import DevicePrediction, Prediction
from potluck.pool.plan import DeviceShare, Plan


def entry(name: str, strategy: str = "tensor", *, predicted_s: float = 2.0, **plan: Any) -> Entry:
    links = (Ranges.of(0, 3), Ranges.of(3, 8)) if strategy == "pipeline" else (None, None)
    speeds = (3.0, 1.0) if strategy == "data" else (0.0, 0.0)
    devices = tuple(
        DeviceShare(f"device-{rank}", Ranges.of(0, 4), Ranges.of(0, 6), Ranges.of(0, 8), links[rank], speeds[rank])
        for rank in range(2)
    )
    memory = tuple(DevicePrediction(d.name, 1.0, 0.5, 3 << 30, 8 << 30) for d in devices)
    job = job_of(train="lora", dtype="fp32", rows=8)
    return Entry(name, Plan(strategy, devices, **plan), Prediction(predicted_s, 0.1, 0.2, memory), job)


def step(step_s: float, *, sitting: int = 0, number: int = 1, wait_s: float = 0.4, stall: float | None = None) -> Step:
    devices = [
        {"compute_s": step_s - wait_s - 0.1, "wait_s": wait_s, "transfer_s": 0.1},
        {"compute_s": step_s - 0.1, "wait_s": 0.0, "transfer_s": 0.1},
    ]
    ranks = [
        {
            "step_s": step_s, "loss": 10.5, "devices": devices if rank == 0 else [], "bytes_sent": 10**6 * (rank + 1),
            "cpu_s": 0.9, "thread_s": (step_s - 0.1) / 2, "context_switches": 100 + 50 * rank, "stall_ratio": stall,
            "peak_rss_mib": 400.0 + rank,
        }
        for rank in range(2)
    ]  # fmt: skip
    return Step(sitting, number, tuple(ranks))


def result(rows: list[dict[str, Any]], **differs: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "set": "A", "shape": "llama-1b", "layers": 6, "train": "lora", "dtype": "fp32", "rows": 8, "length": 128,
        "speeds": [0.6, 0.4], "strategies": rows, "ratios": [], "recovered": {"measured": 0.91, "computed": None},
        "limit_s": 1.5, "single_cpu_s": 1.5, "prediction_error": 0.07, "left_out": {"data": "it does not fit."},
        "auto": {"data_stays": "tensor", "data_moves": "pipeline"},
    }  # fmt: skip
    return content | differs
