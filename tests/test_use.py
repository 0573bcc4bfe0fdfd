"""Results on disk, used: what cannot be used is said in a sentence."""

import json
from pathlib import Path

import pytest
from transformers import BertConfig

from potluck.errors import BadInput
from potluck.job import Job, dump_job
from potluck.job_sections import Data
from potluck.models.precision import torch_dtype
from potluck.texts.rows import read_rows
from potluck.use import encode_for, evaluate_result, generate, merge_result, open_result
from word_model import save_word_model


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


def test_directories_may_be_strings(tmp_path: Path) -> None:
    missing = str(tmp_path / "none")
    with pytest.raises(BadInput, match="There is no directory"):
        evaluate_result(missing, ["a.jsonl"])
    with pytest.raises(BadInput, match="There is no directory"):
        merge_result(missing, str(tmp_path / "merged"))


def test_one_string_is_not_a_list_of_characters(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="list of prompts"):
        generate(tmp_path, "hello")
    with pytest.raises(TypeError, match="list of sources"):
        evaluate_result(tmp_path, "a.jsonl")


def test_a_template_of_the_jobs_own_comes_from_the_adapter(tmp_path: Path) -> None:
    model, adapter = save_word_model(tmp_path / "model"), tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(model)}))
    data = Data(train=["a.jsonl"], format="messages", template=str(tmp_path / "gone.jinja"))
    (adapter / "job.yaml").write_text(dump_job(Job(model="m", data=data, output=adapter)))
    assert open_result(adapter).data.template == data.template
    (adapter / "chat_template.jinja").write_text("{{ messages }}")
    assert open_result(adapter).data.template == str(adapter / "chat_template.jinja")


def test_held_out_texts_are_cut_to_the_models_positions(tmp_path: Path) -> None:
    model = save_word_model(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4}))
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "light", "completion": " on" * 9}))
    rows = read_rows([str(tmp_path / "a.jsonl")], "auto")
    assert [len(each.ids) for each in encode_for(model, rows, Data(train=["-"], max_length=64))] == [4]


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_a_result_is_used_as_exactly_as_it_was_trained(dtype: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "job.yaml").write_text(
        dump_job(Job(model="m", data=Data(train=["a.jsonl"]), output=tmp_path, dtype=dtype))
    )
    assert open_result(tmp_path).inference_dtype() == torch_dtype(dtype)


def test_an_encoder_says_no_tokens(tmp_path: Path) -> None:
    BertConfig().save_pretrained(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    with pytest.raises(BadInput, match="encoder, which reads a text as a whole and says no tokens"):
        generate(tmp_path, ["hello"])
    with pytest.raises(BadInput, match="encoder, which reads a text as a whole and says no tokens"):
        evaluate_result(tmp_path, [str(tmp_path / "a.jsonl")])
