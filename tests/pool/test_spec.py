"""What a coordinator may have another machine's device do, and what it may not."""

from typing import Any

import pytest

from pool.guests import JOB, spec
from potluck.errors import BadInput
from potluck.pool.spec import DeviceSpec, assigned_spec

LOCAL = {"access": {"token": "t"}, "address": "10.0.0.2", "cache": "/cache", "nice": True, "pace": None, "threads": 3}


def assigned(told: Any, *data: str) -> dict[str, Any]:
    return assigned_spec(told, "cam-1", data, LOCAL)


def test_what_is_told_and_what_this_machine_decides() -> None:
    found = DeviceSpec.model_validate(assigned(spec(plan={"strategy": "tensor"}, template="{{ messages }}")))
    assert (found.task, found.rank, found.names, found.owns) == ("train", 1, ("hub", "cam-1"), False)
    assert (found.plan, found.template) == ({"strategy": "tensor"}, "{{ messages }}")
    assert {field: getattr(found, field) for field in LOCAL} == LOCAL
    assert (found.model_dir, found.result_dir, found.store) == (None, None, None)


@pytest.mark.parametrize(
    "field", ["model_dir", "result_dir", "store", "access", "address", "cache", "threads", "nice", "pace"]
)
def test_fields_that_are_this_machines_own_are_refused(field: str) -> None:
    with pytest.raises(BadInput, match=rf"does not do \({field}: "):
        assigned(spec(**{field: "/etc"}))


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 0},
        {"rank": 2},
        {"name": "hub"},
        {"names": ["cam-1", "hub"]},
        {"names": ["hub", "cam-1", "cam-2"]},
        {"world_size": 1},
        {"job": {}},
        {"plan": "/etc/passwd"},
    ],
)
def test_what_is_not_for_this_device_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="The coordinator asks for what a joined device does not do"):
        assigned(spec(**fields))


@pytest.mark.parametrize("told", [None, [], "run", {}])
def test_what_is_no_assignment_is_refused(told: object) -> None:
    with pytest.raises(BadInput, match="The coordinator asks for"):
        assigned(told)


@pytest.mark.parametrize(("owns", "train"), [(True, ["mine.jsonl"]), (False, ["-"])])
def test_no_file_that_the_job_names_is_touched(owns: bool, train: list[str]) -> None:
    data = {"train": ["/secret/a"], "eval": ["/secret/b"], "template": "/secret/c", "format": "text"}
    job = {**JOB, "model": "/secret/d", "output": "/secret/e", "data": data, "overwrite": True, "batch_size": 5}
    found = assigned(spec(owns=owns, job=job), "mine.jsonl")["job"]
    assert "/secret" not in str(found)
    assert found["data"]["train"] == train
    assert (found["data"]["template"], found["data"]["format"]) == ("auto", "auto")
    assert (found["overwrite"], found["batch_size"]) == (False, 5)


def test_data_that_nobody_brought_are_not_asked_for() -> None:
    with pytest.raises(BadInput, match="cam-1 joined without: join with --data"):
        assigned(spec(owns=True))


def test_data_leave_only_where_the_guest_permits_it() -> None:
    moving = spec(owns=True, job=JOB | {"data_stays": False})
    with pytest.raises(BadInput, match=r"data_stays: true, or join with --data-may-leave"):
        assigned(moving, "mine.jsonl")
    assert assigned_spec(moving, "cam-1", ["mine.jsonl"], LOCAL, data_may_leave=True)["owns"]
    assert not assigned(moving | {"owns": False})["owns"]


def test_a_spec_that_cannot_be_used_shows_no_token() -> None:
    with pytest.raises(ValueError, match="rank") as caught:
        DeviceSpec.model_validate(assigned(spec()) | {"rank": {"token": "hidden"}})
    assert "hidden" not in str(caught.value)
