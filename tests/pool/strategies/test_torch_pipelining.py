"""Torch's own pipelining over the plain model gives the gradients ours gives."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pool.strategies.torch_batches import BLOCKS, batches
from pool.tiny import VOCAB, config, save_tiny
from potluck.chain.comm import Comm
from potluck.chain.ranges import Ranges
from potluck.job_sections import Lora
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.pool.plan import DeviceShare, Plan
from potluck.pool.step import Settings, Stepper
from potluck.pool.strategies.build import part_for, strategy_for
from potluck.pool.turns import Turn
from worlds import run_world

TESTS = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("torch_stage.py")


@pytest.mark.slow
def test_torch_pipelining_gives_the_same_gradients(tmp_path: Path) -> None:
    cfg = config("llama", num_hidden_layers=4, tie_word_embeddings=False)
    checkpoint = Checkpoint.open(save_tiny(cfg, tmp_path / "model"))
    ours = {train: of_our_pipeline(cfg, checkpoint, train, tmp_path) for train in ("full", "lora")}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS), str(TESTS.parent)))}
    argv = [sys.executable, str(SCRIPT)]
    ranks = [subprocess.Popen([*argv, str(r), "3", str(tmp_path)], env=environment) for r in range(len(BLOCKS))]
    try:
        assert [rank.wait(500) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    for train, expected in ours.items():
        for schedule in ("gpipe", "1f1b"):
            stages = [load_file(tmp_path / f"{train}.{schedule}.{rank}.safetensors") for rank in range(len(BLOCKS))]
            losses = [float(stage.pop("loss")) for stage in stages]
            found = {name: gradient for stage in stages for name, gradient in stage.items()}
            assert sum(losses) == pytest.approx(float(expected["loss"]), abs=1e-9)
            assert set(found) == set(expected) - {"loss"}
            for name, gradient in found.items():
                assert float((gradient - expected[name]).abs().max()) < 1e-9, name


def of_our_pipeline(cfg: object, checkpoint: Checkpoint, train: str, directory: Path) -> dict[str, Tensor]:
    """Loss and gradients of the same stages; what they begin with is left in ``directory``."""
    whole = (Ranges.of(0, 9), Ranges.of(0, 26))
    devices = [
        DeviceShare(
            f"device-{rank}", *whole, Ranges.of(0, VOCAB if rank == 2 else 0), Ranges.of(2 * b.start, 2 * b.stop)
        )
        for rank, b in enumerate(BLOCKS)
    ]
    plan, settings = Plan("pipeline", tuple(devices)), Settings(steps=1, learning_rate=1e-3)
    lora = Lora(rank=4, alpha=8) if train == "lora" else None
    decoder = decoder_of(cfg)  # type: ignore[arg-type]

    def body(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        part = part_for(plan, comm.rank, checkpoint, decoder, compute=torch.float64, adapter=lora, seed=0)
        trained = part.chain.trained
        for t in trained if lora else ():
            t.local.detach().normal_(0, 0.3, generator=torch.Generator().manual_seed(len(t.name)))
        initial = {t.name: t.local.detach().clone() for t in trained}
        stepper = Stepper(part, comm, settings, strategy_for(plan, part, comm, settings))
        loss = stepper.accumulate([Turn(0, batches() if comm.rank == 0 else None)]).loss
        found = {t.name: t.local.grad for t in trained if t.local.grad is not None}
        return initial, {**found, "loss": torch.tensor(loss, dtype=torch.float64)}

    initial, found = zip(*run_world(3, body), strict=True)
    save_file({n: t for each in initial for n, t in each.items()}, directory / f"{train}.initial.safetensors")
    return {name: gradient for each in found for name, gradient in each.items()}
