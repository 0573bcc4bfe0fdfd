"""What connected clients and the server tell each other: averages that are right, and no label that must not pass."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from step_worlds import FIRST_USED, Passed, Ran, recorded, run, save_model, some_texts, step_job

OWN = {name: some_texts(count, seed) for seed, (name, count) in enumerate({"ann": 8, "bob": 3, "cat": 5}.items())}
EVERY = 2
PREFIX = "base_model.model."
Messages = tuple[Ran, list[Passed]]


def messages(tmp: Path, scheme: str, client: str, encoding: str) -> Messages:
    save_model(tmp / "model")
    job = step_job(
        tmp, {"scheme": scheme, "client": client, "encoding": encoding, "average_every": EVERY}, batch_size=6
    )
    with recorded() as passed:
        ran = run(job, tmp, OWN, holdout="1")
    assert (ran.error, ran.errors) == (None, {})
    return ran, passed


@pytest.fixture(scope="module")
def l_shaped(tmp_path_factory: pytest.TempPathFactory) -> Messages:
    return messages(tmp_path_factory.mktemp("l"), "l-shaped", "trainable", "int8")


@pytest.fixture(scope="module")
def u_shaped(tmp_path_factory: pytest.TempPathFactory) -> Messages:
    return messages(tmp_path_factory.mktemp("u"), "u-shaped", "trainable", "bf16")


def test_after_so_many_steps_all_have_the_mean_weighted_by_target_tokens(l_shaped: Messages) -> None:
    ran, passed = l_shaped
    assert ran.outcome is not None
    learned = dict.fromkeys(OWN, 0)
    by_client = {name: [m for m in passed if m.client == name] for name in OWN}
    averages = {name: [m for m in of_one if m.words["do"] == "average"] for name, of_one in by_client.items()}
    steps = ran.outcome.steps
    assert all(len(of_one) == -(-steps // EVERY) for of_one in averages.values())
    unequal = 0
    for turn in range(-(-steps // EVERY)):
        for name, of_one in by_client.items():
            learned[name] = _targets_before(of_one, turn)
        total = sum(learned.values())
        unequal += len(set(learned.values())) > 1
        for tensor in averages["ann"][turn].tensors:
            mean = sum(learned[name] / total * averages[name][turn].tensors[tensor] for name in OWN)
            for name in OWN:
                torch.testing.assert_close(averages[name][turn].answered[tensor], mean, rtol=1e-5, atol=1e-7)
    assert unequal
    saved = load_file(Path(ran.outcome.adapter) / "adapter_model.safetensors")
    last = averages["bob"][-1].answered
    assert {name for name in saved if ".layers.0." in name} == {f"{PREFIX}{name}" for name in last}
    assert all(torch.equal(saved[f"{PREFIX}{name}"], tensor) for name, tensor in last.items())
    assert any(tensor.abs().max() > 1e-3 for name, tensor in last.items() if "lora_B" in name)


def _targets_before(of_one: list[Passed], turn: int) -> int:
    """Targets in a client's steps between one average and the next."""
    found, targets = -1, 0
    for message in of_one:
        if message.words["do"] == "average":
            found += 1
            if found == turn:
                return targets
            targets = 0
        elif message.words["do"] == "step":
            targets += len(message.tensors["targets_N"])
    raise AssertionError("there is no such average")


def test_u_shaped_no_message_holds_a_label(u_shaped: Messages) -> None:
    _, passed = u_shaped
    assert {m.words["do"] for m in passed} == {"begin", "judge", "verdict", "step", "gradient", "average", "leave"}
    activations = {"lengths_B", "supervised", "x_RD"}
    for message in passed:
        match message.words["do"]:
            case "begin" | "verdict" | "leave":
                assert not message.tensors
            case "gradient":
                assert message.tensors.keys() == {"gradient_ND"}
            case "step" | "judge":
                assert message.tensors.keys() == activations
                assert sum(message.tensors["lengths_B"].tolist()) == len(message.tensors["x_RD"])
            case _:
                assert all(".lora_" in name and tensor.is_floating_point() for name, tensor in message.tensors.items())
        assert_no_id(message)
    begin = next(m.words for m in passed if m.words["do"] == "begin")
    assert begin.keys() == {"do", "process", "examples", "held_out", "targets"}


def test_in_embeddings_mode_no_message_holds_an_id(l_shaped: Messages) -> None:
    _, passed = l_shaped
    for message in passed:
        assert_no_id(message)
        if message.words["do"] == "step":
            assert int(message.tensors["targets_N"].max()) < 40 < FIRST_USED


def test_tables_hold_each_target_once(l_shaped: Messages) -> None:
    _, passed = l_shaped
    for message in passed:
        if message.words["do"] == "begin":
            rows = message.tensors["table/q_UD"]
            assert len(rows.unique(dim=0)) == len(rows) <= 41
            assert len(message.tensors["negatives/q_UD"]) == -(-512 // 3)


def assert_no_id(message: Passed) -> None:
    """Ids are 300 and more; no length, channel or index here is."""
    for name, tensor in message.tensors.items():
        if not tensor.is_floating_point() and tensor.dtype not in (torch.int8, torch.uint8):
            assert int(tensor.max()) < FIRST_USED, name
    numbers = [value for value in _numbers(message.words) if isinstance(value, int)]
    assert all(value < FIRST_USED for value in numbers)


def _numbers(words: object) -> Iterator[object]:
    if isinstance(words, dict | list):
        for value in words.values() if isinstance(words, dict) else words:
            yield from _numbers(value)
    else:
        yield words
