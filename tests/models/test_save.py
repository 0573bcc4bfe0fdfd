import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import save_tiny, tiny_llama
from transformers import AutoModelForCausalLM

from potluck.errors import BadInput, PotluckError, SaveFailed
from potluck.models.checkpoint import Checkpoint
from potluck.models.save import CheckpointWriter, check_output, replace_directory


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def old(tmp_path: Path) -> Path:
    target = tmp_path / "result"
    (target / "inner").mkdir(parents=True)
    (target / "inner" / "adapter").write_text("old")
    return target


def test_a_new_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "runs" / "one"
    with replace_directory(target, overwrite=False) as partial:
        assert partial.parent == target.parent
        (partial / "adapter").write_text("new")
        CheckpointWriter(partial).finish()
        assert not target.exists()
    assert (target / "adapter").read_text() == "new"
    readable = target.stat().st_mode & 0o666
    assert {file.stat().st_mode & 0o777 for file in target.iterdir()} == {readable}
    assert [*target.parent.iterdir()] == [target]


def test_an_empty_directory_may_be_there(tmp_path: Path) -> None:
    with replace_directory(tmp_path / "result", overwrite=False) as partial:
        (tmp_path / "result").mkdir()
        (partial / "adapter").write_text("new")
    assert (tmp_path / "result" / "adapter").read_text() == "new"


def test_the_old_stays_without_overwrite(old: Path) -> None:
    with pytest.raises(BadInput, match=r"not empty: .*--overwrite"), replace_directory(old, overwrite=False):
        pass
    assert (old / "inner" / "adapter").read_text() == "old"


def test_overwrite_replaces_all_of_it(old: Path) -> None:
    with replace_directory(old, overwrite=True) as partial:
        (partial / "new").touch()
        assert (old / "inner" / "adapter").read_text() == "old"
    assert [path.name for path in old.iterdir()] == ["new"]
    assert [*old.parent.iterdir()] == [old]


def test_a_link_keeps_pointing_at_the_result(old: Path) -> None:
    link = old.with_name("link")
    link.symlink_to(old)
    with replace_directory(link, overwrite=True) as partial:
        (partial / "new").touch()
    assert link.is_symlink()
    assert (old / "new").exists()


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt(), FileNotFoundError(2, "gone", "data")])
def test_failure_leaves_the_old(old: Path, error: BaseException) -> None:
    def fail() -> None:
        with replace_directory(old, overwrite=True) as partial:
            (partial / "new").touch()
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (old / "inner" / "adapter").read_text() == "old"
    assert [*old.parent.iterdir()] == [old]


def test_the_old_comes_back_if_the_new_cannot_take_its_place(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = Path.rename

    def refuse(self: Path, target: Path) -> Path:
        if self.suffix == ".partial":
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(SaveFailed, match="Permission denied"), replace_directory(old, overwrite=True):
        pass
    assert (old / "inner" / "adapter").read_text() == "old"
    assert [*old.parent.iterdir()] == [old]


@pytest.mark.parametrize("by", ["safetensors", "text"])
def test_a_write_that_fails_is_a_sentence(old: Path, by: str) -> None:
    def save() -> None:
        with replace_directory(old, overwrite=True) as partial:
            if by == "text":
                (partial / "big").write_bytes(bytes(1 << 21))
            writer = CheckpointWriter(partial)
            writer.add("w", torch.zeros(1 << 19))
            writer.finish()

    with files_of_at_most(1 << 20), pytest.raises(SaveFailed, match=r"result could not be saved: File too large .*MiB"):
        save()
    assert (old / "inner" / "adapter").read_text() == "old"
    assert [*old.parent.iterdir()] == [old]


@pytest.mark.root
def test_a_full_disk_is_a_sentence(tmp_path: Path) -> None:
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", tmp_path], capture_output=True)
    if mount.returncode:
        pytest.skip("cannot mount a small disk here")
    try:
        with replace_directory(tmp_path / "result", overwrite=False) as partial:
            (partial / "adapter").write_text("old")

        def save() -> None:
            with replace_directory(tmp_path / "result", overwrite=True) as partial:
                writer = CheckpointWriter(partial)
                writer.add("w", torch.zeros(1 << 20))
                writer.finish()

        with pytest.raises(SaveFailed, match=r"the disk is full .* has 1 MiB free"):
            save()
        assert (tmp_path / "result" / "adapter").read_text() == "old"
        assert [*tmp_path.iterdir()] == [tmp_path / "result"]
    finally:
        subprocess.run(["umount", tmp_path], check=True)


def test_places_that_are_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    for path in (Path("/"), home, work, Path(), tmp_path, Path("..")):
        with pytest.raises(BadInput, match="a directory of its own"):
            check_output(path, overwrite=True)
    check_output(work / "result", overwrite=False)
    with pytest.raises(BadInput, match="mount point"):
        check_output(Path("/proc"), overwrite=True)


def test_outputs_that_cannot_be_made(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BadInput, match="is a file: name a directory"):
        check_output(file, overwrite=True)
    with pytest.raises(BadInput, match="file is a file"):
        check_output(file / "result", overwrite=False)
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        with pytest.raises(BadInput, match="not writable"):
            check_output(tmp_path / "result", overwrite=False)


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12), limit=st.integers(1, 100))
def test_shards_hold_everything_once(tmp_path_factory: pytest.TempPathFactory, sizes: list[int], limit: int) -> None:
    directory = tmp_path_factory.mktemp("shards")
    tensors = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
    writer = CheckpointWriter(directory, max_shard_bytes=limit * 4)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    with Checkpoint.open(directory) as checkpoint:
        assert set(checkpoint.names) == tensors.keys()
        assert all(torch.equal(checkpoint.read(name), tensors[name]) for name in tensors)
    shards = [*directory.glob("*.safetensors")]
    assert (directory / "model.safetensors").exists() == (len(shards) == 1)
    assert (directory / "model.safetensors.index.json").exists() == (len(shards) > 1)


def test_views_are_saved_alone(tmp_path: Path) -> None:
    whole = torch.randn(100, 10)
    writer = CheckpointWriter(tmp_path)
    writer.add("rows", whole[3:5])
    writer.add("columns", whole[:, 2:4])
    with pytest.raises(ValueError, match="rows was added twice"):
        writer.add("rows", whole)
    writer.finish()
    assert (tmp_path / "model.safetensors").stat().st_size < 1200
    with Checkpoint.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint.read("rows"), whole[3:5])
        assert torch.equal(checkpoint.read("columns"), whole[:, 2:4])


def test_transformers_loads_the_shards(tmp_path: Path) -> None:
    model = tiny_llama(tied=False)
    save_tiny(tmp_path / "a", tied=False)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    writer = CheckpointWriter(tmp_path / "b", max_shard_bytes=10_000)
    for name, tensor in model.state_dict().items():
        writer.add(name, tensor)
    writer.finish()
    assert len([*(tmp_path / "b").glob("model-*-of-*.safetensors")]) > 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    "told",
    [
        "device-0: SafetensorError: Error while serializing: I/O error: No space left on device (os error 28)",
        "device-0: OSError: [Errno 28] No space left on device: 'config.json'",
    ],
)
def test_a_device_that_finds_the_disk_full(told: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("kept")
    with (
        pytest.raises(SaveFailed, match="out could not be saved: the disk is full"),
        replace_directory(tmp_path / "out", overwrite=True),
    ):
        raise PotluckError(told)
    assert [file.name for file in tmp_path.rglob("*")] == ["out", "old"]


def test_other_faults_of_a_device_are_told_as_they_are(tmp_path: Path) -> None:
    with (
        pytest.raises(PotluckError, match="the loss is not finite") as raised,
        replace_directory(tmp_path / "out", overwrite=False),
    ):
        raise PotluckError("device-0: the loss is not finite")
    assert not isinstance(raised.value, SaveFailed)
