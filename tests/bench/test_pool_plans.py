from collections.abc import Sequence
from typing import Any

import pytest

from pool.profiles import GIB, profile
from potluck.bench.pool_plans import (
    STRATEGIES,
    Entry,
    Planned,
    in_more_rows,
    job_of,
    plan_all,
    work_of_rows,
)
from potluck.bench.pool_run import needed_bytes
from potluck.bench.pool_sets import shape_of
from potluck.models.families import decoder_of

SPEEDS = (0.6, 0.45, 0.4)


def planned(
    wanted: Sequence[str] = STRATEGIES, *, layers: int = 6, rows: int = 8, speeds: Sequence[float] = SPEEDS, **of: Any
) -> Planned:
    config = shape_of("smollm2-135m", layers).config(layers)
    job = job_of(train="lora", dtype="fp32", rows=rows)
    work = work_of_rows(job, config, 128)
    profiles = [profile(f"device-{i}", speed=speed, of=work, **of) for i, speed in enumerate(speeds)]
    return plan_all(job, decoder_of(config), work, profiles, profiles, wanted)


def by_name(found: Planned) -> dict[str, Entry]:
    return {entry.name: entry for entry in found.entries}


def test_each_strategy_takes_all_devices_of_the_set() -> None:
    found = planned()
    assert not found.left_out
    rows = by_name(found)
    for name in STRATEGIES[:-1]:
        assert rows[name].devices == ["device-0", "device-1", "device-2"], name
        assert rows[name].prediction.step_s > 0
    assert len(rows["tensor"].plan.devices[0].columns) > len(rows["tensor"].plan.devices[2].columns)
    assert rows["tensor-uniform-sync"].plan == rows["tensor-uniform"].plan
    assert {len(d.columns) for d in rows["tensor-uniform"].plan.devices} == {512}
    assert (rows["tensor-uniform-sync"].job.half_batches, rows["tensor-uniform-sync"].job.wire) == (1, "fp32")
    assert {(rows[name].job.half_batches, rows[name].job.wire) for name in ("tensor", "tensor-uniform", "optimum")} == {
        (2, "bf16")
    }
    links = sorted(d.links.spans for d in rows["pipeline"].plan.devices if d.links is not None)
    assert links[0][0][0] == 0
    assert links[-1][0][1] == 12
    assert all(d.speed > 0 for d in rows["data"].plan.devices)


def test_waiting_for_each_message_is_predicted_to_take_longer() -> None:
    rows = by_name(planned())
    assert rows["tensor-uniform-sync"].prediction.step_s > rows["tensor-uniform"].prediction.step_s
    assert rows["tensor-uniform"].prediction.step_s > rows["tensor"].prediction.step_s


def test_auto_is_a_row_of_its_own_only_where_its_plan_is_none_of_the_others() -> None:
    found = planned(speeds=(1.0, 0.001, 0.001))  # nobody would wait for these
    assert found.auto["data_stays"] == "auto, data_stays"
    alone = by_name(found)["auto, data_stays"]
    assert (alone.plan.strategy, alone.devices) == ("single", ["device-0"])
    assert found.auto["data_moves"] == "auto, data_stays", "the same plan is not run twice"
    chosen = planned()
    assert set(chosen.auto) == {"data_stays", "data_moves"}
    assert set(chosen.auto.values()) <= by_name(chosen).keys()


def test_what_cannot_be_carried_out_is_left_out_with_its_reason() -> None:
    found = planned(("tensor", "pipeline", "pipeline-uniform"), layers=1)
    assert list(by_name(found)) == ["tensor"]
    assert "link" in found.left_out["pipeline"]
    assert "link" in found.left_out["pipeline-uniform"]
    found = planned(("tensor", "pipeline"), rows=2)
    assert "micro-batch" in found.left_out["pipeline"]
    found = planned(("data",), available=GIB // 4)
    assert "GiB" in found.left_out["data"]


def test_a_profile_grows_with_rows() -> None:
    one = profile("a")
    two = in_more_rows(one, 2)
    assert two.work.rows == 2 * one.work.rows
    assert two.work.supervised == 2 * one.work.supervised
    for name in ("attention_s", "mlp_s", "head_s", "attention_bytes"):
        assert getattr(two, name)(7) == pytest.approx(2 * getattr(one, name)(7))
    assert two.runtime_bytes == one.runtime_bytes
    assert two.optimizer_s == one.optimizer_s


def test_processes_share_what_was_imported() -> None:
    entry = by_name(planned(("tensor",)))["tensor"]
    alone = sum(device.memory_bytes for device in entry.prediction.devices)
    assert needed_bytes(entry, 0) == alone + 3 * (64 << 20)
    assert needed_bytes(entry, 300 << 20) == alone - 3 * (300 << 20) + 3 * (64 << 20)
