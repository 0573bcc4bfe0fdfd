"""A device's process before and after its task."""

import json
import subprocess
import sys
from typing import Any

import pytest

from pool.guests import spec
from pool.tiny import config
from potluck.errors import BadInput
from potluck.models.families.fields import fields_of
from potluck.pool import device
from potluck.pool.spec import DeviceSpec, assigned_spec

ACCESS = {"url": "https://127.0.0.1:1", "fingerprint": "00", "token": "t"}


def joined(*data: str) -> DeviceSpec:
    local = {"access": ACCESS, "threads": 1}
    return DeviceSpec.model_validate(assigned_spec(spec(owns=bool(data)), "cam-1", data, local))


@pytest.mark.parametrize(
    ("error", "told_by_owner", "told_by_others"),
    [
        (ValueError("my own text"), "ValueError", "ValueError: my own text"),
        (BadInput("mine.jsonl:3 is empty."), "mine.jsonl:3 is empty.", "mine.jsonl:3 is empty."),
    ],
)
def test_what_a_library_quotes_of_a_guests_data_is_not_told(
    error: Exception, told_by_owner: str, told_by_others: str
) -> None:
    assert device._told_of(error, joined("mine.jsonl")) == told_by_owner
    assert device._told_of(error, joined()) == told_by_others


@pytest.mark.parametrize(
    ("strategy", "fields", "leaves"),
    [
        ("pipeline", ({"links": [[0, 2]]}, {"links": [[2, 4]]}), "the ids of cam-1's texts would go to hub"),
        ("data", ({"speed": 1.0}, {"speed": 1.0}), "rows of cam-1 would go to hub"),
    ],
)
def test_no_plan_moves_data_that_stay(strategy: str, fields: tuple[dict[str, Any], ...], leaves: str) -> None:
    held = {"heads": [[0, 1]], "columns": [[0, 1]], "vocab_rows": [[0, 1]]}
    devices = [{"name": name, **held, **each} for name, each in zip(("hub", "cam-1"), fields, strict=True)]
    told = joined("mine.jsonl").model_copy(update={"plan": {"strategy": strategy, "devices": devices}})
    with pytest.raises(BadInput, match=rf"{leaves} \(data_stays: true forbids it"):
        device.run_task(told, lambda: pytest.fail("a group was made"), lambda event: None)


def test_slow_devices_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts: list[float] = []
    asked: list[object] = []

    class Store:
        def __init__(self, client: object, generation: int, timeout_s: float = 60.0) -> None:
            timeouts.append(timeout_s)

        def set(self, key: str, value: bytes) -> None:
            asked.append(key)

        def wait(self, keys: list[str]) -> None:
            asked.append(keys)

    monkeypatch.setattr("potluck.control.client.Client", lambda access: None)
    monkeypatch.setattr("potluck.control.store.ControlStore", Store)
    monkeypatch.setattr("potluck.control.preflight.check_paths", lambda *told: asked.append("paths"))
    monkeypatch.setattr(device, "gloo_group", lambda *told, timeout_s: asked.append("group"))
    alone = joined()
    device._group(alone)
    assert timeouts[0] > 24 * 3600, "another device may fetch its part of the model over a slow link"
    assert timeouts[1] == device.SILENCE_S
    everyone = [f"ready/{rank}" for rank in range(alone.world_size)]
    assert asked == [f"ready/{alone.rank}", everyone, "paths", "group"]


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_a_device_without_texts_needs_no_transformers(family: str) -> None:
    """Nor what it would bring along; a device's description of the model comes from the fields it is told."""
    code = (
        "import json, sys, torch, potluck.pool.device\n"
        "from potluck.models.families import decoder_of\n"
        "from potluck.models.families.fields import Fields\n"
        "rope = decoder_of(Fields(json.load(sys.stdin))).layers[0].rope\n"
        "assert rope is None or rope(8, torch.float32)\n"
        "print(*{'transformers', 'peft', 'huggingface_hub', 'sympy', 'torch._dynamo'} & set(sys.modules))\n"
    )
    fields = json.dumps(fields_of(config(family)))
    done = subprocess.run([sys.executable, "-c", code], input=fields, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("config", [None, {}, {"model_type": "llama"}, {"model_type": "llama", "hidden_size": "wide"}])
def test_a_description_that_says_too_little_is_a_sentence(config: dict[str, Any] | None) -> None:
    told = joined().model_copy(update={"config": config, "plan": {"strategy": "single", "devices": []}})
    with pytest.raises(BadInput, match="description of the model cannot be used"):
        device.run_task(told, lambda: None, lambda event: None)
