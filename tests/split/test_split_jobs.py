"""Jobs, invites and models that split training is started with: what cannot be used is named, the rest works."""

import json
from pathlib import Path
from typing import Any

import pytest
from little_store import COMMANDS, WORDS, little_job
from one_shot_world import client_of, give, rows_file, served
from safetensors import safe_open
from safetensors.torch import load

from potluck.errors import BadInput, DeviceLost, PotluckError
from potluck.job import Job, parse_job
from potluck.pool.tune import tune
from potluck.split.agreement import Manifest, parse_manifest
from potluck.split.client import fetch
from potluck.split.one_shot import MANIFEST_FILE
from potluck.split.serve import Serving, serve
from potluck.split.settings import store_dir
from potluck.split.store import Store
from potluck.split.trainer import train_store
from word_model import save_word_model

ROWS = COMMANDS[:16]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def kept(directory: Path) -> Manifest:
    return parse_manifest((directory / "kept" / MANIFEST_FILE).read_bytes())


def test_invites_that_lead_nowhere(tmp_path: Path) -> None:
    data = rows_file(tmp_path / "rows.jsonl", ROWS)
    job = little_job(tmp_path)
    with served(job, tmp_path) as server:
        invite = server.invite
    with pytest.raises(DeviceLost, match="does not answer"):
        give(invite, tmp_path, "ann", data, model=job.model, patience_s=0.2)
    with pytest.raises(BadInput, match="invite"):
        give("not an invite", tmp_path, "ann", data)
    with pytest.raises(BadInput):
        give(invite, tmp_path, "../ann", data)


def refused_job(directory: Path, said: str, split: dict[str, Any] | None = None, **fields: Any) -> None:
    job = little_job(directory, split, **fields)
    with pytest.raises(BadInput, match=said):
        serve(job, Serving(home=directory / "server"))
    with pytest.raises(BadInput, match=said):
        train_store(job)
    assert not job.output.exists()


def test_jobs_that_cannot_be_served(tmp_path: Path) -> None:
    refused_job(tmp_path, "split.cut is 3, but the model has 3 blocks: 1 to 2 can be cut off", {"cut": 3})
    refused_job(tmp_path, "nothing", lora={"targets": ["nothing"]})
    of_clients = {"targets": ["model.layers.0.mlp.up_proj"]}
    refused_job(tmp_path, "matches linears of frozen blocks only", lora=of_clients)
    refused_job(tmp_path, "no file .*none.jinja", data={"template": str(tmp_path / "none.jinja")})
    content = {"model": str(tmp_path / "model"), "output": tmp_path / "adapter"}
    with pytest.raises(BadInput, match="leaves after its upload"):
        parse_job({**content, "split": {"scheme": "one-shot", "client": "trainable"}})
    with pytest.raises(BadInput, match=r"data\.train names no examples"):
        parse_job(content)
    with pytest.raises(BadInput, match="run 'potluck serve' on it"):
        tune(parse_job({**content, "split": {}}))
    whole = parse_job({**content, "train": "full", "data": {"train": ["data.jsonl"]}})
    with pytest.raises(BadInput, match="trains adapters"):
        serve(whole, Serving(home=tmp_path / "server"))
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "mine").write_text("")
    with pytest.raises(BadInput, match="adapter is not empty"):
        serve(parse_job({**content, "split": {}}), Serving(train_when=1, home=tmp_path / "server"))
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be a store"):
        serve(
            parse_job({**content, "split": {"cut": 1, "store": tmp_path / "file"}}), Serving(home=tmp_path / "server")
        )


def test_two_servers_of_one_store(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    with served(job, tmp_path), pytest.raises(BadInput, match=r"Another server uses .*: stop it, or name another"):
        serve(job, Serving(home=tmp_path / "server"))


def test_a_job_without_a_split_section_is_served_by_the_defaults(tmp_path: Path) -> None:
    save_word_model(tmp_path / "model", WORDS, num_hidden_layers=3)
    data = rows_file(tmp_path / "rows.jsonl", ROWS)
    job = Job(model=str(tmp_path / "model"), output=tmp_path / "adapter", data={"train": [str(data)]}, dtype="fp32")
    with served(job, tmp_path) as server:
        give(server.invite, tmp_path, "ann", data)
        (manifest,) = Store(store_dir(job)).contributions()
        assert (manifest.agreement.cut, manifest.agreement.encoding, manifest.agreement.targets) == (
            2,
            "int8",
            "embeddings",
        )
    with pytest.raises(BadInput, match="Nothing has been contributed"):
        train_store(little_job(tmp_path, {"store": tmp_path / "another"}))


@pytest.mark.parametrize("own_copy", [True, False])
def test_an_untied_models_targets_are_rows_of_its_head(tmp_path: Path, own_copy: bool) -> None:
    save_word_model(tmp_path / "model", WORDS, num_hidden_layers=3, tie_word_embeddings=False)
    job = little_job(tmp_path, {"encoding": "fp32"}, epochs=8)
    data = rows_file(tmp_path / "rows.jsonl", [*ROWS, *ROWS])
    with served(job, tmp_path) as server:
        given = give(
            server.invite,
            tmp_path,
            "ann",
            data,
            model=job.model if own_copy else None,
            holdout="4",
            keep=tmp_path / "kept",
        )
        assert given.examples == 28
        outcome = train_store(job)
    assert outcome is not None
    assert outcome.after["overall"].loss < 0.7 * outcome.before["overall"].loss
    with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
        head_VD = file.get_tensor("lm_head.weight")
    sha256 = next(shard.sha256 for shard in kept(tmp_path).shards if shard.part == "table")
    rows_UD = load((tmp_path / "kept" / f"{sha256}.safetensors").read_bytes())["rows_UD"]
    assert all((head_VD == row_D).all(dim=1).any() for row_D in rows_UD)


def test_a_store_of_another_cut_is_not_trained_on(tmp_path: Path) -> None:
    job = little_job(tmp_path, {"cut": 1})
    data = rows_file(tmp_path / "rows.jsonl", ROWS)
    with served(job, tmp_path) as server:
        give(server.invite, tmp_path, "ann", data, model=job.model)
    with pytest.raises(BadInput, match=r"The contribution of ann is for something else\. .*cut 2 here, 1 there"):
        train_store(little_job(tmp_path, {"cut": 2}))


def test_a_server_that_sends_no_adapter(tmp_path: Path) -> None:
    job = little_job(tmp_path)
    with served(job, tmp_path) as server:
        job.output.mkdir()
        (job.output / "adapter_model.safetensors").write_bytes(b"")
        (job.output / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None, "r": [1]})[:-3])
        with pytest.raises(PotluckError, match="What the server sends is no adapter"):
            fetch(server.invite, tmp_path / "out", client_of(tmp_path, "ann"))
    assert not (tmp_path / "out").exists()
