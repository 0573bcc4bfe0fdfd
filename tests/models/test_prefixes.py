"""A model saved without its head is the same model."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from pool.tiny import config, save_tiny, shares
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt"])
def test_names_of_a_headless_model(family: str, tmp_path: Path) -> None:
    cfg = config(family, tie_word_embeddings=True)
    whole = save_tiny(cfg, tmp_path / "whole")
    AutoModel.from_pretrained(whole, dtype=torch.float64).save_pretrained(tmp_path / "headless")
    plan = shares(cfg, [9], [26], [61])
    parts = []
    for directory in (whole, tmp_path / "headless"):
        with Checkpoint.open(directory) as checkpoint:
            part = build_part(checkpoint, decoder_of(cfg), plan, 0, compute=torch.float64, adapter=None, seed=0)
            parts.append({t.name: t.local.detach() for t in part.chain.trained} | {"head": part.head.W_VD})
    assert parts[0].keys() == parts[1].keys()
    assert all(torch.equal(tensor, parts[1][name]) for name, tensor in parts[0].items())
