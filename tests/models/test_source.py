import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from potluck.errors import BadInput
from potluck.models.families import decoder_of
from potluck.models.shapes import check_model
from potluck.models.source import resolve, user_cache


def make_model(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "llama"}')
    save_file({"w": torch.zeros(1)}, directory / "model.safetensors")
    return directory


def test_a_directory_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    assert resolve(str(model)) == model
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == model
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/model") == model


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no model at /nowhere/model"):
        resolve("/nowhere/model")
    with pytest.raises(BadInput, match=r"no model at nothing\.gguf"):
        resolve("nothing.gguf")
    with pytest.raises(BadInput, match=r"no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    with pytest.raises(BadInput, match=r"give one of its files: a\.gguf"):
        resolve(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(BadInput, match="is an adapter"):
        resolve(str(tmp_path))
    config = tmp_path / "config.json"
    config.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\n")
    with pytest.raises(BadInput, match="git lfs pull"):
        resolve(str(tmp_path))
    config.write_text("{}")
    with pytest.raises(BadInput, match=r"neither model\.safetensors nor"):
        resolve(str(tmp_path))
    with pytest.raises(BadInput, match="give the directory"):
        resolve(str(config))


def test_pickles_are_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(BadInput, match=r"only as pytorch_model\.bin, a pickle"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("named", ["[]", "{}", "5", "null", '["M; import os"]', '[{"a": 1}]'])
def test_what_a_config_names_does_not_become_code(named: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(f'{{"architectures": {named}}}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(BadInput, match=r"\'from transformers import AutoModelForCausalLM as M;"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("file", ["pytorch_model.bin", "weights.pt"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_how_a_pickle_is_converted(file: str, tied: bool, tmp_path: Path) -> None:
    """The command in the message is one that works."""
    directory = save_tiny(tmp_path / "it's a model", tied, torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(directory)
    torch.save(model.state_dict(), directory / file)
    (directory / "model.safetensors").unlink()
    with pytest.raises(BadInput) as caught:
        resolve(str(directory))
    command = shlex.split(str(caught.value).splitlines()[1])
    assert command[0] == "python"
    subprocess.run([sys.executable, "-P", *command[1:]], check=True, timeout=300)
    check_model(resolve(str(directory)), decoder_of(model.config))
    converted = AutoModelForCausalLM.from_pretrained(directory)
    assert converted.dtype == torch.bfloat16
    assert all(torch.equal(a, b) for a, b in zip(converted.parameters(), model.parameters(), strict=True))


def test_user_cache_follows_the_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache() == tmp_path / "potluck"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache() == tmp_path / ".cache" / "potluck"


def test_hub_ids_come_from_the_hub_cache(tmp_path: Path) -> None:
    """In a process of its own, since huggingface_hub reads its settings when it is imported."""
    revision = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--org--tiny"
    make_model(repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    program = (
        "import sys\n"
        "from potluck.errors import BadInput\n"
        "from potluck.models.source import resolve\n"
        "print(resolve('org/tiny', tell=print))\n"
        "try:\n"
        "    resolve('org/absent')\n"
        "except BadInput as error:\n"
        "    print(error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    told, found, error = result.stdout.splitlines()
    assert "org/tiny" in told
    assert Path(found) == repository / "snapshots" / revision
    assert error.startswith("There is no directory org/absent, and it could not be fetched")
