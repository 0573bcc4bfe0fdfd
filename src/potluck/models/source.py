"""What a person calls a model, found on disk as a directory in Hugging Face layout."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

from potluck.errors import BadInput
from potluck.models.cache import user_cache
from potluck.models.gguf import converted
from potluck.models.shards import INDEX_FILE, LFS_START, SINGLE_FILE

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "vocab.txt", "merges.txt", "LICENSE*", "NOTICE*"]
_HUB_NOT = ["*/*", "consolidated*"]  # the same weights again, in other layouts
_PICKLES = ["pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt"]


def resolve(model: str, *, tell: Callable[[str], None] | None = None, cache: Path | None = None) -> Path:
    """The directory with config.json, safetensors and tokenizer files of a model.

    Args:
        model: such a directory, a .gguf file (converted once, see :func:`potluck.models.gguf.converted`), or a hub
            id (fetched once by huggingface_hub, with its cache and its login).
        tell: called with one line before something slow.
        cache: where converted files are kept; the user's cache directory if left out.

    Raises:
        BadInput: there is no such model, or it has no safetensors.
        SaveFailed: the disk is full.
    """
    path = Path(model).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return converted(path, cache or user_cache() / "gguf", tell)
    if path.is_file():
        raise BadInput(f"{path} is a file: give the directory it lies in, or a .gguf file.")
    if path.is_dir():
        check_directory(path)
        return path.absolute()
    if path.suffix.lower() == ".gguf" or not _HUB_ID.fullmatch(model):
        raise BadInput(f"There is no model at {path}.")
    fetched = _fetched(model, tell)
    check_directory(fetched)
    return fetched


def check_directory(directory: Path) -> None:
    """See whether a directory holds a model in Hugging Face layout; weights are not read.

    Raises:
        BadInput: what is missing, and how to get it.
    """
    config = directory / "config.json"
    if not config.is_file():
        ggufs = sorted(file.name for file in directory.glob("*.gguf"))
        if (directory / "adapter_config.json").is_file():
            raise BadInput(f"{directory} is an adapter, not a model: give the model it was trained on.")
        if ggufs:
            raise BadInput(f"{directory} has no config.json; give one of its files: {', '.join(ggufs)}.")
        raise BadInput(f"{directory} is not a model in Hugging Face layout: it has no config.json.")
    with config.open("rb") as handle:
        if handle.read(len(LFS_START)) == LFS_START:
            raise BadInput(f"{config} is a Git LFS pointer: run 'git lfs pull' in {directory}.")
    if (directory / SINGLE_FILE).is_file() or (directory / INDEX_FILE).is_file():
        return
    pickles = sorted(file.name for pattern in _PICKLES for file in directory.glob(pattern))
    if pickles:
        raise BadInput(
            f"{directory} has its weights only as {pickles[0]}, a pickle, which may hold code and is not opened here. "
            f"Convert it once, with what reads tensors and runs no code:\n{_conversion(directory, pickles[0])}"
        )
    raise BadInput(f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}.")


def _conversion(directory: Path, file: str) -> str:
    """For a person to run: a command that writes the weights of a pickled file beside it, as safetensors."""
    if not file.endswith(".bin"):  # transformers would not find it
        code = (
            "import torch, safetensors.torch as s;"
            f' t = torch.load({_quoted(directory / file)}, weights_only=True, map_location="cpu");'
            f' s.save_file({{n: t[n].clone() for n in t}}, {_quoted(directory / SINGLE_FILE)}, {{"format": "pt"}})'
        )
    else:
        try:
            named = str(json.loads((directory / "config.json").read_text(encoding="utf-8"))["architectures"][0])
        except (OSError, ValueError, LookupError, TypeError):
            named = ""
        model = named if named.isidentifier() else "AutoModelForCausalLM"
        code = (
            f"from transformers import {model} as M; d = {_quoted(directory)};"
            ' M.from_pretrained(d, dtype="auto", weights_only=True).save_pretrained(d)'
        )
    return f"python -c {shlex.quote(code)}"


def _quoted(path: Path) -> str:
    """The path as Python writes it, in double quotes."""
    return json.dumps(str(path.absolute()), ensure_ascii=False)


def _fetched(model: str, tell: Callable[[str], None] | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    if tell is not None:
        tell(f"Looking for {model} on the Hugging Face hub.")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES, ignore_patterns=_HUB_NOT))
    except GatedRepoError:
        raise BadInput(f"{model} is gated: accept its terms on the hub and log in with 'hf auth login'.") from None
    except RepositoryNotFoundError:
        raise BadInput(f"There is no directory {model}, and no model of that name on the hub.") from None
    except LocalEntryNotFoundError:
        raise BadInput(
            f"There is no directory {model}, and it could not be fetched from the hub: the hub cannot be reached, "
            "and the model is not in its cache."
        ) from None
    except Exception as error:  # whatever the hub's HTTP client of the day raises
        reason = " ".join(str(error).split())
        raise BadInput(
            f"There is no directory {model}, and it could not be fetched from the hub ({type(error).__name__}: "
            f"{reason[:200]})."
        ) from None
