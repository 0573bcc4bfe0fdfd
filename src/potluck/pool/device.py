"""A device as a process of its own: told what to do by one JSON line on stdin, it says how it goes on stdout.

``python -m potluck.pool.device`` is started by :mod:`potluck.pool.launch`. The end of its stdin means that nobody
waits for it any more.
"""

import json
import os
import resource
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import FileStore, ProcessGroup, Store  # type: ignore[attr-defined]

from potluck.chain.comm import Comm, gloo_group
from potluck.chain.pace import Pace, come_first
from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.job import Job, parse_job
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_for
from potluck.models.families.decoder import Decoder
from potluck.models.families.fields import Fields
from potluck.models.memory import free_at_once, memory_mib
from potluck.models.precision import choose_dtype, torch_dtype
from potluck.models.shapes import check_shapes
from potluck.pool.local import stand_back
from potluck.pool.owner import read_training_data
from potluck.pool.plan import Plan, forbidden, what_leaves
from potluck.pool.profile import Work
from potluck.pool.spec import DeviceSpec
from potluck.pool.strategies.build import prefetch_for
from potluck.pool.trainer import train

if TYPE_CHECKING:
    from potluck.models.fetched import Fetched

# What only some devices need is imported where it is needed: a training device has no memory to spare for it.

_PREPARING_S = 7 * 24 * 3600.0
SILENCE_S = 600.0  # a device that neither answers nor ends for so long is taken for lost

Emit = Callable[[dict[str, Any]], None]


def main() -> int:
    """Run one device; returns its exit code."""
    spec = DeviceSpec.model_validate_json(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    events = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1, encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between the events

    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), file=events, flush=True)

    imported_mib = memory_mib("VmRSS")
    free_at_once()
    try:
        run_task(spec, lambda: _group(spec), emit)
    except Exception as error:
        kind = "peer" if isinstance(error, DeviceLost) else "own"
        code = error.exit_code if isinstance(error, PotluckError) else 1
        said = {"event": "error", "rank": spec.rank, "kind": kind, "message": _told_of(error, spec)}
        emit({**said, "exit_code": code, "traceback": traceback.format_exc()})
        return code
    emit(finished(spec.rank, imported_mib))
    return 0


def _told_of(error: Exception, spec: DeviceSpec) -> str:
    """What the coordinator is told; errors of libraries may quote texts, which stay with a guest that brought them."""
    if isinstance(error, PotluckError):
        return str(error)
    return type(error).__name__ if spec.owns and spec.rank else f"{type(error).__name__}: {error}"


def finished(rank: int, imported_mib: float) -> dict[str, Any]:
    """The last event of a device: what it took of its machine."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "event": "finished",
        "rank": rank,
        "peak_rss_mib": memory_mib("VmHWM"),
        "import_rss_mib": imported_mib,
        "cpu_s": usage.ru_utime + usage.ru_stime,
    }


def run_task(spec: DeviceSpec, make_group: Callable[[], ProcessGroup | None], emit: Emit) -> None:
    """Do what a spec says; the group is made when this device has all that it needs from elsewhere.

    Raises:
        PotluckError: as :func:`potluck.pool.trainer.train`.
    """
    if spec.nice:
        stand_back()
    torch.set_num_threads(spec.threads)
    job = parse_job(spec.job)
    with tempfile.TemporaryDirectory(prefix="potluck-") as private:
        if spec.template is not None:
            template = Path(private) / "template.jinja"
            template.write_text(spec.template, encoding="utf-8")
            job = job.model_copy(update={"data": job.data.model_copy(update={"template": str(template)})})
        if spec.task == "measure":
            _measure(spec, job, make_group, emit)
        else:
            _train(spec, job, make_group, emit)


def _train(spec: DeviceSpec, job: Job, make_group: Callable[[], ProcessGroup | None], emit: Emit) -> None:
    assert spec.plan is not None
    plan = Plan.from_json(spec.plan)
    if spec.owns and job.data_stays and (leaves := what_leaves(plan.devices, [plan.devices[spec.rank].name])):
        raise BadInput(f"strategy: '{plan.strategy}' is not possible: {forbidden(leaves)}")
    result_dir = None if spec.result_dir is None else Path(spec.result_dir)
    decoder = decoder_for(Fields(spec.config or {}), job)
    if spec.model_dir is not None:
        comm, _ = _comm(spec, job, make_group)
        train(job, plan, decoder, comm, Path(spec.model_dir), result_dir, emit, owns=spec.owns)
        return
    fetched = _model(spec, with_tokenizer=spec.owns)

    def progress(done: int, total: int) -> None:
        emit({"event": "fetching", "rank": spec.rank, "done": done, "total": total})

    with Checkpoint.open(fetched.directory, fetched.need) as checkpoint:
        check_shapes(checkpoint, decoder)
        prefetch_for(
            plan,
            spec.rank,
            checkpoint,
            decoder,
            job.adapter,
            owns=spec.owns,
            train_embeddings=job.train_embeddings,
            progress=progress,
        )
    emit({"event": "fetched", "rank": spec.rank, "bytes": fetched.bytes_fetched})
    comm, _ = _comm(spec, job, make_group)
    train(job, plan, decoder, comm, fetched.directory, result_dir, emit, owns=spec.owns, need=fetched.need)


def _comm(spec: DeviceSpec, job: Job, make_group: Callable[[], ProcessGroup | None]) -> tuple[Comm, Pace | None]:
    group, pace = make_group(), None
    if spec.pace is not None:
        come_first()
        pace = Pace(spec.pace)
    return Comm(group, wire=torch_dtype("fp64" if job.dtype == "fp64" else job.wire), pace=pace), pace


def _group(spec: DeviceSpec) -> ProcessGroup | None:
    """The process group of all devices; None for a device alone."""
    if spec.world_size == 1:
        return None
    store: Store
    if spec.store is not None:
        store = FileStore(spec.store, spec.world_size)
        return gloo_group(store, spec.rank, spec.world_size, "127.0.0.1", timeout_s=SILENCE_S)
    from potluck.control.client import Client
    from potluck.control.connection import Access
    from potluck.control.preflight import check_paths
    from potluck.control.store import ControlStore

    assert spec.access is not None
    client = Client(Access.from_json(spec.access))
    # a slow disk or link may keep a device for hours; one that ended is told of by the control channel
    ready = ControlStore(client, spec.generation, timeout_s=_PREPARING_S)
    ready.set(f"ready/{spec.rank}", b"1")
    ready.wait([f"ready/{rank}" for rank in range(spec.world_size)])
    store = ControlStore(client, spec.generation, timeout_s=SILENCE_S)
    check_paths(store, spec.rank, spec.names, spec.address)
    return gloo_group(store, spec.rank, spec.world_size, spec.address, timeout_s=SILENCE_S)


def _measure(spec: DeviceSpec, job: Job, make_group: Callable[[], ProcessGroup | None], emit: Emit) -> None:
    """Read what data a guest brings, agree on a dtype, then measure this device and the link between all."""
    from potluck.pool.link import measure_link
    from potluck.pool.measure import measure
    from potluck.pool.measured_work import decoder_of_work, message_bytes

    assert spec.work is not None
    work = Work.model_validate(spec.work)
    model = decoder_of_work(work)
    brings = spec.owns and spec.rank and spec.access is not None
    longest = _longest_of_guest(spec, job, model, emit) if brings else 0
    comm, pace = _comm(spec, job, make_group)
    if job.dtype == "auto":
        slower = float(choose_dtype("auto", model.hidden_size, model.intermediate_size) != "bf16")
        # bf16 can be a hundred times slower where the processor has no instructions for it: one such device decides
        anyone_slower = float(comm.all_reduce(torch.tensor([slower]), exact=True).wait())
        work = work.model_copy(update={"dtype": "fp32" if anyone_slower else "bf16"})
    profile = measure(work, device=spec.name, threads=spec.threads, pace=pace, fresh=spec.fresh)
    if comm.group is not None:
        profile = profile.model_copy(update={"link": measure_link(comm, message_bytes(work, job.wire))})
    told = {"profile": profile.model_dump(mode="json"), "longest": longest}
    emit({"event": "profile", "rank": spec.rank, **told})


def _longest_of_guest(spec: DeviceSpec, job: Job, decoder: Decoder, emit: Emit) -> int:
    """Tokens of the longest example: memory must do for it. What cannot be used is refused here, before any plan."""
    fetched = _model(spec, with_tokenizer=True)
    emit({"event": "fetched", "rank": spec.rank, "bytes": fetched.bytes_fetched})
    encoded = read_training_data(job, fetched.directory, decoder)
    return max(len(example.ids) for example in encoded.examples)


def _model(spec: DeviceSpec, *, with_tokenizer: bool) -> "Fetched":
    """The coordinator's model: its config, with the tokenizer if that is wanted, and weights as they are read."""
    from potluck.control.client import Client
    from potluck.control.connection import Access
    from potluck.models.fetched import Fetched

    assert spec.access is not None
    client = Client(Access.from_json(spec.access))
    fetched = Fetched(Path(spec.cache), client.model_files(), client.ranges)
    if with_tokenizer:
        fetched.fetch_small()
    else:
        fetched.whole("config.json")
    return fetched


def _end_with_parent() -> None:
    os.read(0, 1)  # a blocked sys.stdin.read would abort the interpreter at its end
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
