"""A device as a process of its own: told what to do by one JSON line on stdin, it says how it goes on stdout.

``python -m potluck.pool.device`` is started by :mod:`potluck.pool.launch`. The end of its stdin means that nobody
waits for it any more.
"""

import json
import os
import resource
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from potluck.chain.comm import Comm, gloo_group
from potluck.errors import DeviceLost, PotluckError
from potluck.job import parse_job
from potluck.models.precision import torch_dtype
from potluck.pool.memory import free_at_once, memory_mib
from potluck.pool.plan import Plan
from potluck.pool.trainer import train

SILENCE_S = 600.0  # a device that neither answers nor ends for so long is taken for lost


def main() -> int:
    """Run one device; returns its exit code."""
    spec = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between the events
    rank = int(spec["rank"])

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    imported_mib = memory_mib("VmRSS")
    free_at_once()
    try:
        _run(spec, rank, emit)
    except Exception as error:
        peer = isinstance(error, DeviceLost)
        code = error.exit_code if isinstance(error, PotluckError) else 1
        message = str(error) if isinstance(error, PotluckError) else f"{type(error).__name__}: {error}"
        said = {"event": "error", "rank": rank, "kind": "peer" if peer else "own", "message": message}
        emit({**said, "exit_code": code, "traceback": traceback.format_exc()})
        return code
    usage = resource.getrusage(resource.RUSAGE_SELF)
    emit(
        {
            "event": "finished",
            "rank": rank,
            "peak_rss_mib": memory_mib("VmHWM"),
            "import_rss_mib": imported_mib,
            "cpu_s": usage.ru_utime + usage.ru_stime,
        }
    )
    return 0


def _run(spec: dict[str, Any], rank: int, emit: Any) -> None:
    job = parse_job(spec["job"])
    plan = Plan.from_json(spec["plan"])
    torch.set_num_threads(int(spec["threads"]))
    group = None
    if plan.strategy != "single":
        world_size = int(spec["world_size"])
        store = FileStore(spec["store"], world_size)
        group = gloo_group(store, rank, world_size, "127.0.0.1", timeout_s=SILENCE_S)
    wire = torch_dtype("fp64" if job.dtype == "fp64" else job.wire)
    train(job, plan, Comm(group, wire=wire), Path(spec["model_dir"]), Path(spec["result_dir"]), emit)


def _end_with_parent() -> None:
    os.read(0, 1)  # a blocked sys.stdin.read would abort the interpreter at its end
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
