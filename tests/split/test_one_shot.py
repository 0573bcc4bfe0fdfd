"""One-shot from invite to adapter: a server, three clients that come, give and leave, training, and the adapter."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from little_store import COMMANDS, little_job
from one_shot_world import Recording, Served, Told, client_of, give, rows_file, served
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from potluck.errors import BadInput
from potluck.job import Job, load_job
from potluck.split.client import Contributed, fetch, withdraw
from potluck.split.result import Outcome
from potluck.split.settings import store_dir
from potluck.split.store import Store
from potluck.split.trainer import train_store
from potluck.use import evaluate_result, generate, merge_result

OWN = {"ann": COMMANDS[0::3], "bob": COMMANDS[1::3], "cat": COMMANDS[2::3]}
TWICE = {name: [*rows, *rows] for name, rows in OWN.items()}
"""What is held out is most likely learnt by heart too, so that a tiny model can get it right."""


@dataclass
class World:
    directory: Path
    job: Job
    server: Served
    given: dict[str, Contributed]
    bobs: Recording
    outcome: Outcome
    fetched: Path
    told: Told


def a_job(directory: Path, **fields: object) -> Job:
    split = {"encoding": "int8", "negatives": 60, "clients": 3}  # each client draws the whole vocabulary
    return little_job(directory, **{"split": split, "epochs": 20, **fields})


def file_of(directory: Path, name: str) -> Path:
    return rows_file(directory / f"{name}.jsonl", TWICE[name])


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("one-shot")
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_CACHE_HOME", str(directory / "cache"))
        job, bobs, given = a_job(directory), Recording(), {}
        with served(job, directory) as server:
            invite, model = server.invite, str(directory / "model")
            given["ann"] = give(invite, directory, "ann", file_of(directory, "ann"), model=model, holdout="10%")
            given["bob"] = give(invite, directory, "bob", file_of(directory, "bob"), traffic=bobs, holdout="3")
            kept = directory / "kept"
            given["cat"] = give(invite, directory, "cat", file_of(directory, "cat"), model=model, keep=kept)
            with pytest.raises(BadInput, match="not trained yet"):
                fetch(invite, directory / "early", client_of(directory, "ann"))
            outcome = train_store(job)
            assert outcome is not None
        with served(job, directory) as server:
            assert server.invite == invite
            told = Told()
            fetched = directory / "fetched"
            fetch(invite, fetched, client_of(directory, "bob", model=model), listener=told)
            yield World(directory, job, server, given, bobs, outcome, fetched, told)
    torch.set_num_threads(threads)


def test_what_clients_gave_is_what_was_trained_on(world: World) -> None:
    held = {name: each.held_out for name, each in world.given.items()}
    assert held == {"ann": round(0.1 * len(TWICE["ann"])), "bob": 3, "cat": 0}
    for name, each in world.given.items():
        assert each.examples == len(TWICE[name]) - held[name]
        assert each.target_tokens == 3 * each.examples  # two letters and the end
        assert each.bytes["sent"]["activations"] > 0 < each.bytes["sent"]["table"]
        assert each.active_s > 0 < each.peak_rss_mib
    assert world.outcome.clients == ("ann", "bob", "cat")
    assert world.outcome.examples == sum(each.examples for each in world.given.values())
    assert 0 < world.outcome.negatives < 20  # words, but for targets; each once, whoever sent it
    assert set(world.outcome.contributions) == {each.contribution for each in world.given.values()}


def test_quality_is_told_by_client_and_overall(world: World) -> None:
    before, after = world.outcome.before, world.outcome.after
    assert before.keys() == after.keys() == {"ann", "bob", "overall"}
    assert after["overall"].examples == after["ann"].examples + after["bob"].examples == 6
    for who in after:  # by three commands that a client's own key chose: how well they are learned differs
        assert after[who].loss < 0.9 * before[who].loss
    written = json.loads((world.fetched / "quality.json").read_text())
    assert written["after"]["overall"]["loss"] == after["overall"].loss


def test_the_adapter_trains_blocks_behind_the_cut_only(world: World) -> None:
    names = load_file(world.fetched / "adapter_model.safetensors").keys()
    assert {int(name.split(".layers.")[1].split(".")[0]) for name in names} == {1, 2}
    assert load_file(world.fetched / "adapter_model.safetensors").keys() == names


def test_stock_peft_loads_what_was_fetched(world: World) -> None:
    base = AutoModelForCausalLM.from_pretrained(world.directory / "model")
    adapted = PeftModel.from_pretrained(base, world.fetched)
    loaded = {name for name, _ in adapted.named_parameters() if "lora_" in name}
    stored = load_file(world.fetched / "adapter_model.safetensors")
    assert {name.replace(".default", "") for name in loaded} == stored.keys()
    assert any(tensor.abs().sum() > 0 for name, tensor in stored.items() if "lora_B" in name)


def test_what_was_fetched_can_be_used_like_any_result(world: World, tmp_path: Path) -> None:
    assert load_job(world.fetched / "job.yaml").model == str(world.directory / "model")
    rows = COMMANDS[:24]
    data = rows_file(tmp_path / "data.jsonl", rows)
    before, after = evaluate_result(world.fetched, [str(data)])
    assert before is not None
    assert after.loss < 0.5 * before.loss
    asked = [str(row["prompt"]) for row in rows]
    said = generate(world.fetched, asked, max_new_tokens=4, format="prompt")
    right = sum(answer.strip() == row["completion"].strip() for answer, row in zip(said, rows, strict=True))
    assert right / len(rows) == pytest.approx(after.accuracy, abs=0.1)
    merged = merge_result(world.fetched, tmp_path / "merged")
    assert evaluate_result(tmp_path / "merged", [str(data)])[1].loss == pytest.approx(after.loss, rel=0.02), merged


def test_who_fetches_is_told_what_it_takes_to_use_it(world: World, tmp_path: Path) -> None:
    assert world.told.said("a machine needs the whole model")
    fetch(world.server.invite, tmp_path / "plain", client_of(world.directory, "ann"))
    config = json.loads((tmp_path / "plain" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == world.job.model  # as the server calls it
    with pytest.raises(BadInput, match="is not empty"):
        fetch(world.server.invite, tmp_path / "plain", client_of(world.directory, "ann"))
    fetch(world.server.invite, tmp_path / "plain", client_of(world.directory, "ann"), overwrite=True)


def test_a_client_fetches_its_blocks_and_whole_tables_and_no_more(world: World) -> None:
    with safe_open(world.directory / "model" / "model.safetensors", "pt") as file:
        needed = [name for name in file.keys() if "embed_tokens" in name or ".layers.0." in name]  # noqa: SIM118
        needed_bytes = sum(file.get_tensor(name).nbytes for name in needed)
    header = 8 + int.from_bytes((world.directory / "model" / "model.safetensors").read_bytes()[:8], "little")
    asked = [run for name, runs in world.bobs.ranges() if name == "model.safetensors" for run in runs]
    got = sum(length for _, length in asked)
    assert needed_bytes <= got <= needed_bytes + header
    assert sorted(asked) == sorted(set(asked))
    total = (world.directory / "model" / "model.safetensors").stat().st_size
    assert got < total - 2 * 4 * 48 * 64  # at least a block's worth is left out


def test_what_is_fetched_tells_nothing_of_the_examples(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other examples, the same requests for the model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    traffic = Recording()
    give(world.server.invite, tmp_path, "dan", rows_file(tmp_path / "dan.jsonl", COMMANDS[:2]), traffic=traffic)
    assert traffic.ranges() == world.bobs.ranges()
    withdraw(world.server.invite, client_of(tmp_path, "dan"))


def test_the_model_is_fetched_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(world.directory / "cache"))
    traffic = Recording()
    give(world.server.invite, world.directory, "eve", file_of(world.directory, "cat"), traffic=traffic)
    assert traffic.ranges() == []
    withdraw(world.server.invite, client_of(world.directory, "eve"))


def test_nothing_is_left_in_the_spool_and_a_copy_where_it_was_wanted(world: World) -> None:
    left = [path for path in (world.directory / "spool").rglob("*") if path.is_file()]
    assert left == []
    manifest = json.loads((world.directory / "kept" / "manifest.json").read_text())
    kept = {path.stem for path in (world.directory / "kept").glob("*.safetensors")}
    assert kept == {shard["sha256"] for shard in manifest["shards"]}


def test_a_name_is_one_clients(world: World, tmp_path: Path) -> None:
    """On another machine the same name is somebody else's; on one machine there may be several clients."""
    with pytest.raises(BadInput, match="ann"):
        give(world.server.invite, tmp_path, "ann", file_of(tmp_path, "bob"), model=str(world.directory / "model"))
    with pytest.raises(BadInput, match="all clients together"):
        give(world.server.invite, tmp_path, "Overall", file_of(tmp_path, "bob"))
    assert {m.client for m in Store(store_dir(world.job)).contributions()} == {"ann", "bob", "cat"}


def test_contributions_come_later_and_go_again(tmp_path: Path) -> None:
    job = a_job(tmp_path, epochs=4)
    model = str(tmp_path / "model")
    with served(job, tmp_path) as server:
        give(server.invite, tmp_path, "ann", file_of(tmp_path, "ann"), model=model, holdout="4")
        first = train_store(job)
        assert first is not None
        assert first.clients == ("ann",)
        fetch(server.invite, tmp_path / "first", client_of(tmp_path, "ann"))
        give(server.invite, tmp_path, "bob", file_of(tmp_path, "bob"), model=model)
        with pytest.raises(BadInput, match="is not empty"):
            train_store(job)
        second = train_store(job, further=True)
        assert second is not None
        assert second.clients == ("ann", "bob")
        assert second.examples == first.examples + len(TWICE["bob"])
        assert second.before["overall"].loss == pytest.approx(first.after["overall"].loss, rel=0.05)
        assert second.after["overall"].loss < first.before["overall"].loss
        fetch(server.invite, tmp_path / "second", client_of(tmp_path, "ann"))
        first_b, second_b = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("first", "second"))
        assert any(not torch.equal(first_b[name], second_b[name]) for name in first_b)

        assert withdraw(server.invite, client_of(tmp_path, "bob")) == "bob"
        assert server.told.said("bob has withdrawn 1 contribution; their files are deleted.")
        assert {m.client for m in Store(store_dir(job)).contributions()} == {"ann"}
        third = train_store(job.model_copy(update={"overwrite": True}))
        assert third is not None
        assert third.clients == ("ann",)


def test_the_same_data_again_is_the_same_contribution(tmp_path: Path) -> None:
    job, data = a_job(tmp_path), file_of(tmp_path, "ann")
    with served(job, tmp_path) as server:
        model = str(tmp_path / "model")
        first, again = (give(server.invite, tmp_path, "ann", data, model=model, holdout="20%") for _ in range(2))
        assert first.contribution == again.contribution
        assert again.bytes["sent"].keys() - {"other"} == {"manifest"}  # every shard was there
        other = give(server.invite, tmp_path, "ann", data, model=model)
        assert other.contribution != first.contribution  # another part is held out
        assert len(Store(store_dir(job)).contributions()) == 2


def test_who_waits_gets_the_adapter_its_examples_are_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.split.fetch._ASK_EVERY_S", 0.1)
    job, model = a_job(tmp_path, epochs=2), str(tmp_path / "model")
    with served(job, tmp_path, train_when=1) as server:
        told = Told()
        done = give(
            server.invite,
            tmp_path,
            "ann",
            file_of(tmp_path, "ann"),
            model=model,
            output=tmp_path / "anns",
            listener=told,
        )
        assert done.adapter == str(tmp_path / "anns")
        assert told.said("Waiting until the server has trained")
        assert json.loads((tmp_path / "anns" / "quality.json").read_text())["clients"] == ["ann"]
        # its format is known here, so that prompts can be written as they were
        assert generate(tmp_path / "anns", ["light on ->"], max_new_tokens=3)

        class TrainsMeanwhile(Told):
            """The server trains again only when the client has begun to wait."""

            def tell(self, text: str) -> None:
                super().tell(text)
                if text.startswith("Waiting"):
                    train_store(job, further=True)

        late = TrainsMeanwhile()
        give(
            server.invite,
            tmp_path,
            "bob",
            file_of(tmp_path, "bob"),
            model=model,
            output=tmp_path / "bobs",
            listener=late,
        )
        assert late.said("Waiting until the server has trained")
        assert json.loads((tmp_path / "bobs" / "quality.json").read_text())["clients"] == ["ann", "bob"]
    with served(job, tmp_path):  # which hands out what was trained, although the output is not empty
        pass
    weights = (job.output / "adapter_model.safetensors").read_bytes()
    with served(job, tmp_path, train_when=1) as server:  # the same command after a restart trains nothing again
        assert server.told.said("Handing out the adapter")
    assert (job.output / "adapter_model.safetensors").read_bytes() == weights
