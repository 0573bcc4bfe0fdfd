"""What is fetched ahead is what a device reads, no less and no more."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pool.tiny import VOCAB, config, save_tiny, shares
from potluck.job_sections import Lora
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.models.fetched import Fetched
from potluck.models.prefetch import prefetch
from potluck.models.tables import tables

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def listing(directory: Path) -> list[dict[str, Any]]:
    return [
        {"name": f.name, "size": f.stat().st_size, "sha256": hashlib.sha256(f.read_bytes()).hexdigest()}
        for f in directory.iterdir()
    ]


@pytest.mark.parametrize("owns", [False, True], ids=["no data", "owner"])
@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "llama-biased", "qwen3", "gemma3"])
def test_after_it_a_device_asks_for_nothing(tmp_path: Path, family: str, targets: list[str] | None, owns: bool) -> None:
    cfg = config(family, tie_word_embeddings=False)
    model = save_tiny(cfg, tmp_path / "model")
    asked: list[int] = []

    def fetch(name: str, runs: list[tuple[int, int]]) -> Iterator[bytes]:
        asked.append(len(runs))
        content = (model / name).read_bytes()
        yield b"".join(content[offset : offset + length] for offset, length in runs)

    fetched = Fetched(tmp_path / "cache", listing(model), fetch)
    decoder = decoder_of(cfg)
    plan = shares(cfg, [1, 3] if family == "gemma3" else [4, 5], [20, 6], [40, 21])
    lora = None if targets is None else Lora(rank=4, targets=targets)
    told: list[tuple[int, int]] = []
    with Checkpoint.open(fetched.directory, fetched.need) as checkpoint:
        headers, requests = fetched.bytes_fetched, len(asked)
        prefetch(
            checkpoint,
            lambda weights: build_part(weights, decoder, plan, 1, compute=torch.float32, adapter=lora, seed=0),
            tables(decoder) if owns else (),
            lambda done, total: told.append((done, total)),
        )
        assert len(asked) == requests + 1
        assert told[-1][0] == told[-1][1] > 0
        there = fetched.bytes_fetched
        part = build_part(checkpoint, decoder, plan, 1, compute=torch.float64, adapter=lora, seed=0)
        if owns:
            part.embedding(torch.arange(VOCAB)[None], torch.float64)
            part.target_rows([*range(VOCAB)])
        assert fetched.bytes_fetched == there
        table_bytes = sum(checkpoint.shape(name)[0] * checkpoint.shape(name)[1] * 8 for name in (EMBEDDING, HEAD))
        own_rows = checkpoint.shape(HEAD)[1] * 21 * 8
        adapters = sum(t.local.nbytes for t in part.chain.trained) if lora else 0
        wanted = part.weight_bytes - adapters + (table_bytes - own_rows if owns else 0)
        assert there - headers == wanted
