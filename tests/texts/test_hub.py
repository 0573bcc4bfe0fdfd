"""Directories of the datasets library, and its hub."""

import sys
from pathlib import Path

import pytest
from sources import content_of

from potluck.errors import BadInput
from potluck.texts.formats import Document
from potluck.texts.rows import read_rows


def test_saved_datasets_with_splits_and_class_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["TurnOn", "TurnOff"])}
    )
    train = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=features)
    train.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": train, "test": train.select([0])}).save_to_disk(str(tmp_path / "splits"))
    train.to_parquet(str(tmp_path / "a.parquet"))

    both = [("a", "TurnOff"), ("b", "TurnOn")]
    for source in ("one", "splits", "a.parquet"):
        rows = read_rows([str(tmp_path / source)], "auto")
        assert [content_of(row) for row in rows] == both
        assert [row.where for row in rows] == [f"{tmp_path / source}:1", f"{tmp_path / source}:2"]
    assert len(read_rows([f"{tmp_path / 'splits'}:test"], "auto")) == 1
    with pytest.raises(BadInput, match="no split 'dev'; add one of these: :train, :test"):
        read_rows([f"{tmp_path / 'splits'}:dev"], "auto")
    with pytest.raises(BadInput, match="has no splits"):
        read_rows([f"{tmp_path / 'one'}:test"], "auto")
    for arrow in (tmp_path / "one").glob("*.arrow"):
        arrow.write_bytes(b"x")
    with pytest.raises(BadInput, match="not a data set that can be loaded"):
        read_rows([str(tmp_path / "one")], "auto")


def test_hub_ids_are_asked_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'datasets' is not installed")
    asked: list[str] = []

    def load(name: str) -> object:
        asked.append(name)
        if name == "nobody/nothing":
            raise ConnectionError("no route\nto the hub")
        return datasets.DatasetDict({"test": datasets.Dataset.from_dict({"text": ["a"]})})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_rows(["owner/some-set"], "auto") == [Document("a", "owner/some-set:1", "text")]
    assert read_rows(["owner/some-set:test"], "auto")[0].where == "owner/some-set:1"
    with pytest.raises(BadInput, match=r"neither a file nor a directory here.*no route$"):
        read_rows(["nobody/nothing"], "auto")
    assert asked == ["owner/some-set", "owner/some-set", "nobody/nothing"]


def test_hub_ids_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BadInput, match=r"pip install 'potluck\[datasets\]'"):
        read_rows(["owner/some-set"], "auto")
