import json
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from potluck.chain.ranges import Ranges
from potluck.errors import BadInput
from potluck.models.checkpoint import Checkpoint

ROWS, COLUMNS = 13, 11
STORED = {
    "wide": torch.randn(ROWS, COLUMNS),
    "half": torch.randn(ROWS, COLUMNS).half(),
    "brain": torch.randn(ROWS, COLUMNS).bfloat16(),
    "double": torch.randn(ROWS, COLUMNS).double(),
    "bias": torch.randn(ROWS),
    "scalar": torch.tensor(2.5),
    "mask": torch.tensor([True, False, True]),
    "cube": torch.randn(4, 3, 2),
    "none": torch.empty(0, 5),
}
INDICES = [*range(ROWS)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    save_file(STORED, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def checkpoint(directory: Path) -> Iterator[Checkpoint]:
    with Checkpoint.open(directory) as opened:
        yield opened


def subset(size: int) -> st.SearchStrategy[Ranges | None]:
    return st.none() | st.builds(Ranges.covering, st.sets(st.integers(0, size - 1)))


def test_every_tensor_is_read_as_saved(checkpoint: Checkpoint) -> None:
    assert checkpoint.names == tuple(sorted(STORED))
    for name, tensor in STORED.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert checkpoint.dtype(name) == tensor.dtype
        read = checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


@given(
    name=st.sampled_from(["wide", "half", "brain", "double"]),
    rows=subset(ROWS),
    columns=subset(COLUMNS),
    dtype=st.sampled_from([None, torch.float32, torch.bfloat16, torch.float64]),
)
def test_slices_equal_the_whole_and_cost_their_bytes(
    checkpoint: Checkpoint, name: str, rows: Ranges | None, columns: Ranges | None, dtype: torch.dtype | None
) -> None:
    whole = STORED[name]
    expected = whole[INDICES if rows is None else [*rows]][:, [*range(COLUMNS)] if columns is None else [*columns]]
    before = checkpoint.bytes_read
    read = checkpoint.read(name, dtype=dtype, rows=rows, columns=columns)
    assert checkpoint.bytes_read - before == expected.numel() * whole.element_size()
    assert read.dtype == (dtype or whole.dtype)
    assert read.shape == expected.shape
    assert torch.equal(read, expected.to(read.dtype))


@given(ids=st.lists(st.integers(0, ROWS - 1)))
def test_rows_by_id_in_any_order(checkpoint: Checkpoint, ids: list[int]) -> None:
    before = checkpoint.bytes_read
    read = checkpoint.rows("brain", ids, dtype=torch.float32)
    assert torch.equal(read, STORED["brain"][ids].float())
    assert checkpoint.bytes_read - before == len(set(ids)) * COLUMNS * 2


def test_conversion_in_many_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.models.checkpoint._CONVERT_BYTES", 28)
    save_file({"w": STORED["wide"]}, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as opened:
        columns = Ranges(((0, 1), (3, 11)))
        read = opened.read("w", dtype=torch.float64, columns=columns)
        assert torch.equal(read, STORED["wide"][:, [*columns]].double())
        assert opened.bytes_read == ROWS * 9 * 4


def test_more_than_two_dimensions(checkpoint: Checkpoint) -> None:
    read = checkpoint.read("cube", rows=Ranges(((1, 3),)), columns=Ranges(((0, 1), (2, 3))))
    assert torch.equal(read, STORED["cube"][1:3][:, [0, 2]])


def test_threads_share_one_checkpoint(directory: Path) -> None:
    wrong: list[str] = []
    with Checkpoint.open(directory) as opened:

        def read() -> None:
            for _ in range(50):
                if not torch.equal(opened.read("wide", columns=Ranges(((2, 7),))), STORED["wide"][:, 2:7]):
                    wrong.append("wide")

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert opened.bytes_read == 4 * 50 * ROWS * 5 * 4


def test_sharded_checkpoint(tmp_path: Path) -> None:
    names = {"a": "x-1.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}
    tensors = {name: torch.randn(3, 2) for name in names}
    for file in set(names.values()):
        save_file({name: tensors[name] for name in names if names[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    with Checkpoint.open(tmp_path) as opened:
        assert opened.names == ("a", "b", "c")
        assert all(torch.equal(opened.read(name), tensors[name]) for name in names)

    index.write_text(json.dumps({"weight_map": {**names, "d": "x-2.safetensors"}}))
    with pytest.raises(BadInput, match=r"x-2\.safetensors does not hold d"):
        Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "x-3.safetensors"}}))
    with pytest.raises(BadInput, match=r"x-3\.safetensors is missing"):
        Checkpoint.open(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "../x-1.safetensors"}}))
    with pytest.raises(BadInput, match="no file of that directory"):
        Checkpoint.open(tmp_path)
    index.write_text("[]")
    with pytest.raises(BadInput, match="not an index"):
        Checkpoint.open(tmp_path)


def test_wrong_slices_are_sentences(checkpoint: Checkpoint) -> None:
    with pytest.raises(BadInput, match="no tensor nothing"):
        checkpoint.read("nothing")
    with pytest.raises(BadInput, match=r"wide .* has shape \(13, 11\): row 13 lies outside its 13 rows"):
        checkpoint.read("wide", rows=Ranges(((12, 14),)))
    with pytest.raises(BadInput, match="column 11 lies outside"):
        checkpoint.read("wide", columns=Ranges(((0, 12),)))
    with pytest.raises(BadInput, match=r"bias .* no columns to slice"):
        checkpoint.read("bias", columns=Ranges(()))
    with pytest.raises(BadInput, match="no row -1"):
        checkpoint.rows("wide", [-1])
    with pytest.raises(BadInput, match="row 13 lies outside"):
        checkpoint.rows("wide", [0, 13])


def test_damaged_files_are_sentences(directory: Path, tmp_path: Path) -> None:
    good = (directory / "model.safetensors").read_bytes()
    file = tmp_path / "model.safetensors"
    with pytest.raises(BadInput, match="not a safetensors checkpoint"):
        Checkpoint.open(tmp_path)
    file.write_bytes(good[:-1])
    with pytest.raises(BadInput, match=r"cut short: \w+ ends at byte"):
        Checkpoint.open(tmp_path)
    for cut in (0, 5, 100):
        file.write_bytes(good[:cut])
        with pytest.raises(BadInput, match="cut short"):
            Checkpoint.open(tmp_path)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(BadInput, match="git lfs pull"):
        Checkpoint.open(tmp_path)
    file.write_bytes(good[:8] + b"!" + good[9:])
    with pytest.raises(BadInput, match="damaged"):
        Checkpoint.open(tmp_path)

    def write_header(**entry: object) -> None:
        header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **entry}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))

    write_header()
    assert Checkpoint.open(tmp_path).names == ("w",)
    write_header(shape=[3])
    with pytest.raises(BadInput, match=r"shape \(3,\), which is not 8 bytes"):
        Checkpoint.open(tmp_path)
    write_header(data_offsets=[-4, 4])
    with pytest.raises(BadInput, match="not 8 bytes"):
        Checkpoint.open(tmp_path)
    write_header(dtype="F8_E4M3")
    with pytest.raises(BadInput, match="w has dtype F8_E4M3"):
        Checkpoint.open(tmp_path)
    write_header(shape="two")
    with pytest.raises(BadInput, match="damaged"):
        Checkpoint.open(tmp_path)


def test_file_cut_while_open(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes((directory / "model.safetensors").read_bytes())
    with Checkpoint.open(tmp_path) as opened:
        with file.open("r+b") as handle:
            handle.truncate(file.stat().st_size - 4)
        with pytest.raises(BadInput, match="ended while"):
            [opened.read(name) for name in opened.names]


def test_column_slices_cost_little_memory(tmp_path: Path) -> None:
    rows, columns, wanted = 5000, 10_000, 200  # 200 MB on disk, 4 MB wanted
    header = json.dumps({"w": {"dtype": "F32", "shape": [rows, columns], "data_offsets": [0, rows * columns * 4]}})
    with (tmp_path / "model.safetensors").open("wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header.encode())
        handle.truncate(8 + len(header) + rows * columns * 4)
    program = f"""
        import resource
        from pathlib import Path
        from potluck.chain.ranges import Ranges
        from potluck.models.checkpoint import Checkpoint
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with Checkpoint.open(Path({str(tmp_path)!r})) as opened:
            opened.read("w", rows=Ranges.of(0, 1))
            before = peak()
            slice = opened.read("w", columns=Ranges(((1000, 1000 + {wanted // 2}), (9000, 9000 + {wanted // 2}))))
            assert slice.shape == ({rows}, {wanted})
            print(peak() - before)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(result.stdout) < (rows * wanted * 4 + (4 << 20)) / 1024
