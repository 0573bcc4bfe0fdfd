"""The job file: what people write, and what a saved job repeats."""

from pathlib import Path

import pytest

from potluck.errors import BadInput
from potluck.job import Job, dump_job, load_job, parse_job
from potluck.job_sections import IA3, Data, Lora


def written(directory: Path, line: str) -> Path:
    file = directory / "job.yaml"
    file.write_text(f"model: m\ndata: {{train: a.jsonl}}\noutput: out\n{line}\n", encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("devices", "read"), [("3", "3"), ("3:2:1", "3:2:1"), ('"3:2:1"', "3:2:1"), ("2.5:1", "2.5:1")]
)
def test_devices_need_no_quotes(devices: str, read: str, tmp_path: Path) -> None:
    assert load_job(written(tmp_path, f"devices: {devices}")).devices == read


def test_a_job_file_may_be_named_by_a_string(tmp_path: Path) -> None:
    file = written(tmp_path, "seed: 7")
    assert load_job(str(file)) == load_job(file)
    with pytest.raises(BadInput, match="There is no job file"):
        load_job(str(tmp_path / "none.yaml"))


@pytest.mark.parametrize("line", ["epochs: .inf", "learning_rate: .inf", "weight_decay: .nan", "clip: .inf"])
def test_numbers_are_finite(line: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=line.split(":")[0]):
        load_job(written(tmp_path, line))


def test_a_saved_job_does_not_overwrite_by_itself(tmp_path: Path) -> None:
    job = Job(model="m", data=Data(train=["a.jsonl"]), output=tmp_path / "out", overwrite=True, devices="3:2:1")
    (tmp_path / "saved.yaml").write_text(dump_job(job), encoding="utf-8")
    assert load_job(tmp_path / "saved.yaml") == job.model_copy(update={"overwrite": False})


@pytest.mark.parametrize("field", ["model", "train", "eval", "template"])
def test_what_a_job_reads_is_not_overwritten(field: str, tmp_path: Path) -> None:
    inside = tmp_path / "out" / "inside"
    inside.parent.mkdir()
    inside.touch()
    fields = {"model": "m", "train": "a.jsonl", "eval": [], "template": "auto", field: str(inside)}
    data = {key: value for key, value in fields.items() if key != "model"}
    content = {"model": fields["model"], "data": data, "output": str(tmp_path / "out"), "overwrite": True}
    with pytest.raises(BadInput, match=r"holds .*inside, which --overwrite would delete"):
        parse_job(content)
    assert parse_job({**content, "output": str(tmp_path / "other")}).overwrite


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"train": "lora"}, "train_embeddings needs train: full"),
        ({"train": "full", "split": {}}, "split never trains embeddings: take out train_embeddings"),
        ({"train": "lora", "split": {}}, "split never trains embeddings: take out train_embeddings"),
    ],
)
def test_embeddings_are_trained_with_all_else(fields: dict[str, object], sentence: str) -> None:
    content = {"model": "m", "data": {"train": "a.jsonl"}, "output": "out", "train_embeddings": True}
    with pytest.raises(BadInput, match=sentence):
        parse_job(content | fields)
    assert parse_job(content | {"train": "full"}).train_embeddings


def test_what_is_trained_beside_the_model() -> None:
    content: dict[str, object] = {"model": "m", "data": {"train": "a.jsonl"}, "output": "out"}
    assert parse_job(content).adapter == Lora()
    job = parse_job({**content, "train": "ia3", "ia3": {"targets": "k_proj"}})
    assert job.adapter == IA3(targets=["k_proj"])
    assert parse_job({**content, "train": "full"}).adapter is None
    with pytest.raises(BadInput, match=r"train: Input should be 'lora', 'ia3' or 'full'"):
        parse_job({**content, "train": "dora"})
    with pytest.raises(BadInput, match=r"ia3\.rank: Extra inputs"):
        parse_job({**content, "ia3": {"rank": 4}})
    with pytest.raises(BadInput, match=r"split trains adapters: train: lora or train: ia3"):
        parse_job({**content, "train": "full", "split": {}})


def test_a_section_that_is_not_used_is_refused() -> None:
    content: dict[str, object] = {"model": "m", "data": {"train": "a.jsonl"}, "output": "out"}
    with pytest.raises(BadInput, match=r"job: lora says something, and is not used with train: ia3: take it out"):
        parse_job({**content, "train": "ia3", "lora": {"use_dora": True}})
    with pytest.raises(BadInput, match=r"job: ia3 says something, and is not used with train: lora: take it out"):
        parse_job({**content, "ia3": {"targets": ["q_proj"]}})
    saved = parse_job({**content, "train": "ia3"}).model_dump()
    assert parse_job(saved).train == "ia3", "a saved job has every section, with its defaults"


def test_the_scale_of_adapters() -> None:
    assert Lora(rank=16, alpha=8).scale == 8 / 16
    assert Lora(rank=16, alpha=8, use_rslora=True).scale == 8 / 4


def classified(**data: object) -> dict[str, object]:
    named = {"train": "a.csv", **data}
    return {"model": "m", "task": "sequence-classification", "data": named, "output": "out"}


def test_labels_are_names(tmp_path: Path) -> None:
    assert parse_job(classified(labels=[1, 0, "b"])).data.labels == ["1", "0", "b"]
    job = parse_job(classified(labels=["yes", "no", "0"], text="body", label="spam"))
    (tmp_path / "saved.yaml").write_text(dump_job(job), encoding="utf-8")
    assert load_job(tmp_path / "saved.yaml") == job
    file = tmp_path / "job.yaml"
    file.write_text("model: m\ntask: sequence-classification\ndata: {train: a.csv, labels: [yes, no]}\noutput: out\n")
    with pytest.raises(BadInput, match=r"data\.labels: .*write them in quotes"):
        load_job(file)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"data": {"train": "a.csv", "labels": ["a", "a"]}}, "names a class twice"),
        ({"data": {"train": "a.csv", "labels": ["a"]}}, "at least two"),
        ({"data": {"train": "a.csv", "text": "a", "label": "a"}}, "must be different columns"),
        ({"data": {"train": "a.csv", "format": "messages"}}, "data.format: 'messages' is for causal-lm"),
        ({"task": "causal-lm", "data": {"train": "a.csv", "text": "a"}}, "are for task: sequence-classification"),
        ({"task": "sequence-regression", "data": {"train": "a.csv", "labels": ["a", "b"]}}, "has none"),
        ({"split": {}}, "split trains causal-lm only, not sequence-classification"),
        ({"task": "token-classification"}, "task: Input should be 'causal-lm'"),
    ],
)
def test_tasks_that_do_not_fit(change: dict[str, object], sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence):
        parse_job(classified() | change)
