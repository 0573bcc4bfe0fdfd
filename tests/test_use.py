"""Results on disk, used: what cannot be used is said in a sentence."""

import json
from pathlib import Path

import pytest

from potluck.errors import BadInput
from potluck.job import Data, Job, dump_job
from potluck.use import generate, merge_result, open_result


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"There is no directory .*none"):
        open_result(tmp_path / "none")


def test_neither_adapter_nor_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"neither an adapter .* nor a model"):
        open_result(tmp_path)


@pytest.mark.parametrize("content", ["{}", "[]", "no json", '{"base_model_name_or_path": ""}'])
def test_an_adapter_without_its_base(content: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(BadInput, match="does not name its base model"):
        open_result(tmp_path)


def test_an_adapter_whose_base_is_gone(tmp_path: Path) -> None:
    base = str(tmp_path / "gone" / "model")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    with pytest.raises(BadInput, match="gone"):
        open_result(tmp_path)


def test_the_job_beside_a_result_says_how_prompts_were_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert open_result(tmp_path).data.format == "prompt"
    data = Data(train=["a.jsonl"], format="messages", template="chatml")
    (tmp_path / "job.yaml").write_text(dump_job(Job(model="m", data=data, output=tmp_path)))
    trained = open_result(tmp_path)
    assert trained.data == data
    assert (trained.base, trained.adapter) == (tmp_path, None)


def test_a_plain_checkpoint_has_nothing_to_merge(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="no adapter to merge"):
        merge_result(tmp_path, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_broken_job_beside_a_result(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "job.yaml").write_text("model: [")
    with pytest.raises(BadInput, match=r"job\.yaml is not YAML"):
        generate(tmp_path, ["hello"])
