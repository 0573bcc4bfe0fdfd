"""The tokenizer that lies beside a model."""

from pathlib import Path
from typing import TYPE_CHECKING

from potluck.errors import BadInput
from potluck.texts.readers import first_line_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(model_dir: Path) -> "PreTrainedTokenizerBase":
    """Load a fast tokenizer from a local directory; nothing is downloaded and none of the model's code is run.

    Raises:
        BadInput: the directory is missing, or has no tokenizer that can be loaded as a fast one.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    if not model_dir.is_dir():
        raise BadInput(f"There is no model directory at {model_dir}.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its parsers do: OSError, ValueError, JSONDecodeError, ...
        found = "its tokenizer.json" if (model_dir / "tokenizer.json").is_file() else "no tokenizer.json; its tokenizer"
        raise BadInput(f"{model_dir} has {found} that cannot be loaded: {first_line_of(error)}") from None
    if not isinstance(tokenizer, PreTrainedTokenizerBase) or not tokenizer.is_fast:
        raise BadInput(f"{model_dir} has only a slow tokenizer; a tokenizer.json is needed.")
    return tokenizer
