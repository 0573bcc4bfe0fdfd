"""A device that also writes down what it sends and the gradients of its first step; the directory is its argument."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.pool import device, trainer
from potluck.pool.step import Gradients, Stepper
from potluck.pool.turns import Turn

DIRECTORY = Path(sys.argv[1])
sent: dict[str, Tensor] = {}


def heard(kind: str, content: Tensor) -> None:
    sent[f"{len(sent):06}.{kind}"] = content.detach().clone().contiguous()


class RecordedComm(Comm):
    def __init__(self, group: Any, **options: Any) -> None:
        super().__init__(group, listener=heard, **options)


class RecordedStepper(Stepper):
    def accumulate(self, turns: Sequence[Turn]) -> Gradients:
        found = super().accumulate(turns)
        if self.done == 0:
            held = self.strategy.part.chain.trained
            gradients = {t.name: torch.zeros_like(t.local) if t.local.grad is None else t.local.grad for t in held}
            save_file({name: each.clone().contiguous() for name, each in gradients.items()}, DIRECTORY / "gradients")
            places = {t.name: None if t.dim is None else [t.dim, list(t.held[self.comm.rank])] for t in held}
            (DIRECTORY / "places.json").write_text(json.dumps(places))
        return found


device.Comm = RecordedComm  # type: ignore[misc]
trainer.Stepper = RecordedStepper  # type: ignore[misc]

if __name__ == "__main__":
    status = device.main()
    save_file(sent, DIRECTORY / "sent")
    sys.exit(status)
