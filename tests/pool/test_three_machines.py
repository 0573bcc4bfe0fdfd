"""Three machines with nothing in common but a network: two owners of different data, one device with neither data nor
model. They train what one process would on the union, and nobody's texts leave.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from pool.leaks import leaks, secrets
from potluck import testbed
from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges
from potluck.chain.share import Share
from potluck.control.invite import Invite
from potluck.job import Job
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of, read_config
from potluck.pool.halves import decode_layouts
from potluck.pool.owner import Feed
from potluck.pool.step import Stepper
from potluck.pool.trainer import settings_of
from potluck.pool.turns import Turn, Turns
from potluck.testbed import TestDevice
from potluck.texts.batch import Batch
from potluck.texts.rows import read_rows
from potluck.use import encode_for
from word_model import save_word_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.alone,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("tc"), reason="needs root, ip and tc"),
]

PREFIX = "ptestpool"
POTLUCK = Path(__file__).with_name("recorded_potluck.py")
WORDS = 1_500
STEPS = 12
PATIENCE_S = 120.0


def save_model(directory: Path) -> None:
    """Weights large enough for what comes with them not to count, and words enough for ids not to look like lengths."""
    words = ["<eos>", *(f"word{i}" for i in range(1, WORDS))]
    differs = {"hidden_size": 240, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.1}
    save_word_model(directory, words, **differs)


def save_texts(path: Path, rows: int, first: int) -> None:
    """Texts of words that only this owner has, from ``word<first>`` on."""
    generator = torch.Generator().manual_seed(first)
    with path.open("w") as file:
        for _ in range(rows):
            length = int(torch.randint(6, 20, (), generator=generator))
            ids = torch.randint(first, first + 500, (length,), generator=generator).tolist()
            file.write(json.dumps({"text": " ".join(f"word{i}" for i in ids)}) + "\n")


@dataclass
class Machine:
    """One emulated machine with a folder of its own, where its home is."""

    device: TestDevice
    folder: Path
    """As the machine sees it."""
    outside: Path
    """Where that folder lies."""
    processes: list["subprocess.Popen[str]"] = field(default_factory=list)

    def start(self, *arguments: str, version: str = "-") -> "subprocess.Popen[str]":
        argv = [sys.executable, str(POTLUCK), str(self.folder), version, *arguments]
        process = subprocess.Popen(
            self.device.command(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"HOME": str(self.folder), "XDG_CACHE_HOME": "", "XDG_DATA_HOME": ""},
            cwd=self.folder,
        )
        self.processes.append(process)
        return process


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    folder = tmp_path / "home"
    folder.mkdir()
    testbed.down(PREFIX)
    bed = testbed.up([1.42, 1, 1], 10**9, names=["hub", "cam-1", "cam-2"], private=[folder], prefix=PREFIX)
    made = {
        each.name: Machine(each, folder, next(own.source for own in each.folders if own.target == folder))
        for each in bed.devices
    }
    try:
        yield made
    finally:
        for machine in made.values():
            for process in machine.processes:
                process.kill()
                process.communicate()
        testbed.down(PREFIX)


def job_of(folder: Path, **differs: object) -> Job:
    fields = {
        "model": str(folder / "model"),
        "data": {"train": str(folder / "hub.jsonl"), "max_length": 32},
        "output": folder / "out",
        "devices": "3:2:1",
        "steps": STEPS,
        "batch_size": 8,
        "micro_batch_size": 2,
        "learning_rate": 1e-3,
        "dtype": "fp32",
        "threads": 1,
    }
    return Job.model_validate(fields | differs)


def start_hub(hub: Machine, job: Job, *options: str, peers: int = 2) -> "tuple[subprocess.Popen[str], str, list[str]]":
    """The process, its invite, and what it said before."""
    (hub.outside / "job.json").write_text(job.model_dump_json(exclude={"overwrite"}))
    process = hub.start("tune", "job.json", "--peers", str(peers), "--json", *options)
    return process, *until(process, r"potluck join (\S+)")


def until(process: "subprocess.Popen[str]", pattern: str) -> tuple[str, list[str]]:
    """What the pattern finds in the first line that has it, and the lines before."""
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(pattern, line):
            return (found[1] if found.groups() else found[0]), lines
    raise AssertionError(f"{pattern!r} was not said, but this: {''.join(lines)}")


def refused(process: "subprocess.Popen[str]") -> str:
    """What it says when it is refused."""
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 2, said
    assert "Traceback" not in said
    return said


def check_interrupt(running: dict[str, "subprocess.Popen[str]"], who: str) -> None:
    """Ctrl-C on one machine ends all within ten seconds, and the others say whose it was."""
    running[who].send_signal(signal.SIGINT)
    deadline = time.monotonic() + 10
    for name, each in running.items():
        said, _ = each.communicate(timeout=max(0.1, deadline - time.monotonic()))
        assert each.returncode == (130 if name == who else 1), said
        assert "Traceback" not in said
        if name != who:
            assert f"{who} was interrupted" in said


def both_owners(machines: dict[str, Machine]) -> None:
    hub, cam = machines["hub"], machines["cam-1"]
    save_model(hub.outside / "model")
    save_texts(hub.outside / "hub.jsonl", 40, first=300)
    save_texts(cam.outside / "cam.jsonl", 24, first=900)


def examples_of(machine: Machine, file: str, job: Job, model_dir: Path) -> Feed:
    examples = encode_for(model_dir, read_rows([str(machine.outside / file)], "auto"), job.data)
    counts = Turns([40, 24, 0], job.batch_size)
    return Feed(examples, examples_a_turn=counts.examples_a_turn, micro_batch_size=job.micro_batch_size, seed=job.seed)


def test_they_train_what_one_would_and_no_text_leaves(machines: dict[str, Machine]) -> None:
    hub, cam_1, cam_2 = machines.values()
    both_owners(machines)
    job = job_of(hub.folder)
    process, invite, _ = start_hub(hub, job)
    first = cam_1.start("join", "--threads", "1", invite, "--data", "cam.jsonl")
    until(first, "Joined")

    other = replace(Invite.decode(invite), secret="x" * 22).encode()
    strangers = {
        "secret is wrong": cam_2.start("join", other),
        "cam-1": cam_2.start("join", invite, "--name", "cam-1"),
        "0.0.1": cam_2.start("join", invite, version="0.0.1"),
        "nowhere.jsonl": cam_2.start("join", invite, "--data", "nowhere.jsonl"),
    }
    for reason, stranger in strangers.items():
        assert reason in refused(stranger)
    second = cam_2.start("join", "--threads", "1", invite)
    said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, said
    for each in (first, second):
        words, _ = each.communicate(timeout=10)
        assert each.returncode == 0, words
        assert "Training has ended" in words
    result = json.loads(said.splitlines()[-1])
    assert [device["name"] for device in result["devices"]] == ["hub", "cam-1", "cam-2"]
    assert [(owner["name"], owner["examples"]) for owner in result["owners"]] == [("hub", 40), ("cam-1", 24)]
    assert result["predicted_step_s"] > 0
    assert result["prediction_error"] == pytest.approx(result["predicted_step_s"] / result["step_s"] - 1)
    assert "cam-1 has no more examples in this epoch" in said

    model_dir = hub.outside / "model"
    feeds = [examples_of(hub, "hub.jsonl", job, model_dir), examples_of(cam_1, "cam.jsonl", job, model_dir)]
    steps = [
        [Turn(0, feeds[owner].batches(turn)) for owner, turn in Turns([40, 24, 0], 8).of(step)] for step in range(STEPS)
    ]
    check_gradients(machines, job, model_dir, steps, hub.outside / "out" / "metrics.jsonl")
    check_privacy(machines, feeds)
    check_fetched(machines, model_dir, result["devices"])


def check_gradients(
    machines: dict[str, Machine], job: Job, model_dir: Path, steps: Sequence[Sequence[Turn]], metrics: Path
) -> None:
    """Gradients of the first step and losses of ten are those of one process with all the data."""
    config = read_config(model_dir)
    whole = Share(Ranges.of(0, config.num_attention_heads), Ranges.of(0, config.intermediate_size), Ranges.of(0, WORDS))
    with Checkpoint.open(model_dir) as checkpoint:
        part = build_part(
            checkpoint, decoder_of(config), [whole], 0, compute=torch.float32, adapter=job.lora, seed=job.seed
        )
        stepper = Stepper(part, Comm(), settings_of(job, STEPS))
        found = stepper.accumulate(steps[0])
        plain = {t.name: t.local.grad.clone() for t in part.chain.trained if t.local.grad is not None}
        compared = 0
        for machine in machines.values():
            places = json.loads((machine.outside / "places.json").read_text())
            for name, ours in load_file(machine.outside / "gradients").items():
                theirs = plain[name]
                if places[name] is not None:
                    dim, indices = places[name]
                    theirs = theirs.index_select(dim, torch.tensor(indices, dtype=torch.long))
                assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * float(plain[name].abs().max() + 1e-12)), name
                compared += int(ours.any())
        assert compared > 3 * 4 * 7 / 2, "B is zero at the start, so only gradients of B say something"
        stepper.update(found.norm, job.learning_rate)
    told = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert told[0]["loss"] == pytest.approx(found.loss, rel=1e-5)
    assert told[0]["gradient_norm"] == pytest.approx(found.norm, rel=1e-4)
    assert told[-1]["loss"] < told[0]["loss"]
    assert sum(told[0]["owned_targets"]) == told[0]["target_tokens"]


def check_privacy(machines: dict[str, Machine], feeds: Sequence[Feed]) -> None:
    """No message, and nothing told to the coordinator, holds anybody's ids or words."""
    batches: list[Batch] = [batch for feed in feeds for turn in range(2) for batch in feed.batches(turn)]
    known = secrets(batches)
    for machine in machines.values():
        sent = load_file(machine.outside / "sent")
        layouts: list[Tensor] = []
        assert len(sent) > 1000
        for name in sorted(sent)[:400]:
            content = sent[name]
            if content.is_floating_point():
                assert not leaks(content, known, WORDS), (machine.device.name, name)
            else:
                layouts.append(content)
        if machine.device.name == "cam-2":
            assert all(content.numel() == 1 for content in layouts), "it has nothing to tell but that it has nothing"
        for content in layouts:
            if content.numel() > 1:
                assert decode_layouts(content), "integers travel only as layouts"
    for name in ("cam-1", "cam-2"):
        assert not re.search(r"word\d", (machines[name].outside / "posted.jsonl").read_text())


def check_fetched(machines: dict[str, Machine], model_dir: Path, devices: Sequence[dict[str, int]]) -> None:
    """A joined device fetched its share, what every device has, and an owner's table: at most 5 % beside."""
    table = WORDS * 240
    per_layer = {"q": 240 * 240, "kv": 2 * 80 * 240, "o": 240 * 240, "mlp": 3 * 512 * 240, "norms": 2 * 240}
    for name, rank, groups in (("cam-1", 1, 1), ("cam-2", 2, 1)):
        share = devices[rank]
        heads, columns = share["heads"] / 6, share["columns"] / 512
        layer = (per_layer["q"] + per_layer["o"]) * heads + per_layer["mlp"] * columns + per_layer["norms"]
        layer += per_layer["kv"] * groups / 2
        embedding = table if name == "cam-1" else share["vocab_rows"] * 240
        wanted = 4 * (4 * layer + embedding + 240)
        posted = [json.loads(line) for line in (machines[name].outside / "posted.jsonl").read_text().splitlines()]
        fetched = [event["bytes"] for event in posted if event["event"] == "fetched"]
        assert len(fetched) == (2 if name == "cam-1" else 1), "an owner fetches the tokenizer before it is measured"
        assert wanted <= sum(fetched) <= 1.05 * wanted, (name, sum(fetched) / wanted)


def start_endless(machines: dict[str, Machine], *options: str) -> tuple[dict[str, "subprocess.Popen[str]"], str]:
    """All three in a training that will not end by itself, and its invite."""
    both_owners(machines)
    hub = machines["hub"]
    process, invite, _ = start_hub(hub, job_of(hub.folder, steps=100_000), *options)
    running = {"hub": process}
    running |= {name: machines[name].start("join", "--threads", "1", invite) for name in ("cam-1", "cam-2")}
    for name in ("cam-1", "cam-2"):
        until(running[name], "Joined")
    return running, invite


def test_an_interrupt_of_a_guest_ends_all_within_ten_seconds(machines: dict[str, Machine]) -> None:
    running, _ = start_endless(machines)
    until(running["hub"], "step 1/")
    check_interrupt(running, "cam-2")
    assert not (machines["hub"].outside / "out").exists()


def test_an_invite_expires_training_goes_on_and_an_interrupt_of_the_hub_ends_all(machines: dict[str, Machine]) -> None:
    running, invite = start_endless(machines, "--invite-minutes", "0.4")
    expires = time.monotonic() + 0.4 * 60  # at the latest: all have joined
    until(running["hub"], "step 1/")
    time.sleep(max(0.0, expires - time.monotonic()))
    assert "expired" in refused(machines["cam-2"].start("join", invite, "--name", "cam-3"))
    step, _ = until(running["hub"], r"step (\d+)/")
    assert int(until(running["hub"], r"step (\d+)/")[0]) > int(step)
    check_interrupt(running, "hub")
    assert not (machines["hub"].outside / "out").exists()


def test_a_device_that_leaves_before_training_ends_the_run_with_a_sentence(machines: dict[str, Machine]) -> None:
    both_owners(machines)
    process, invite, _ = start_hub(machines["hub"], job_of(machines["hub"].folder))
    first, second = (machines[name].start("join", "--threads", "1", invite) for name in ("cam-1", "cam-2"))
    until(process, "Measuring")
    second.kill()
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "cam-2" in said
    assert "Traceback" not in said
    words, _ = first.communicate(timeout=10)
    assert first.returncode == 1
    assert "cam-2" in words
