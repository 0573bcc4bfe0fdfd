"""Token ids and labels stay with their owner: no message of three steps holds them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pool.leaks import leaks, secrets
from pool.tiny import VOCAB, batch, config, save_tiny, shares
from potluck.chain.comm import Comm
from potluck.chain.embedding import Embedding
from potluck.job_sections import Lora
from potluck.models.build import build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of
from potluck.pool.halves import decode_layouts, encode_layouts
from potluck.pool.step import OWNER, Settings, Stepper
from potluck.pool.turns import Turn
from potluck.texts.batch import Batch
from worlds import run_world

WORLD = 3
Heard = list[list[tuple[str, Tensor]]]


def three_private_steps() -> list[list[Batch]]:
    return [[batch((14, 11, 10), 10 * s), batch((12, 9), 10 * s + 1)] for s in range(3)]


def recorder(heard: Heard) -> Callable[[int], Callable[[str, Tensor], None]]:
    return lambda rank: lambda kind, content: heard[rank].append((kind, content.detach().clone()))


def forbidden(ids: list[int]) -> Tensor:
    raise AssertionError(f"a device that owns no data looked up rows {ids}")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    def opened(family: str) -> Checkpoint:
        return Checkpoint.open(save_tiny(config(family), tmp_path_factory.mktemp("model")))

    return opened


@pytest.mark.parametrize("wire", [None, torch.bfloat16], ids=["exact", "bf16"])
@pytest.mark.parametrize("half_batches", [1, 2])
@pytest.mark.parametrize("targets", [None, ["all-linear"]], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_no_message_of_three_steps_holds_ids_or_labels(
    checkpoints: Callable[[str], Checkpoint],
    family: str,
    targets: list[str] | None,
    half_batches: int,
    wire: torch.dtype | None,
) -> None:
    cfg, checkpoint = config(family), checkpoints(family)
    heads = [2, 1, 1] if family == "gemma3" else [5, 3, 1]
    plan = shares(cfg, heads, [13, 9, 4], [31, 20, 10])
    lora = None if targets is None else Lora(rank=4, targets=targets)
    steps = three_private_steps()
    heard: Heard = [[] for _ in range(WORLD)]

    def body(comm: Comm) -> list[float]:
        part = build_part(checkpoint, decoder_of(cfg), plan, comm.rank, compute=torch.float32, adapter=lora, seed=0)
        if comm.rank != OWNER:
            part = replace(part, embedding=Embedding(forbidden, 1.0), target_rows=forbidden)
        stepper = Stepper(part, comm, Settings(steps=3, learning_rate=1e-2, half_batches=half_batches))
        return [stepper.step([Turn(OWNER, batches if comm.rank == OWNER else None)]).loss for batches in steps]

    losses = run_world(WORLD, body, wire=wire, listener=recorder(heard))
    assert all(each == losses[0] for each in losses)

    known = secrets([each for batches in steps for each in batches])
    messages = [message for rank in heard for message in rank]
    assert len(messages) > 3 * WORLD * len(steps)
    integers = [content for _, content in messages if not content.is_floating_point()]
    floats = [content for _, content in messages if content.is_floating_point()]
    assert [kind for kind, content in messages if leaks(content, known, VOCAB) and content.is_floating_point()] == []
    assert sum(content.numel() for content in floats) > 1000

    # Integers travel only as layouts, each after its length, and only from the owner.
    assert all(content.is_floating_point() for rank in heard[1:] for _, content in rank)
    assert len(integers) == 2 * len(steps)
    for size, content, batches in zip(integers[::2], integers[1::2], steps, strict=True):
        layouts = [each.layout for each in batches]
        assert size.tolist() == [content.numel()]
        assert decode_layouts(content) == layouts
        assert torch.equal(encode_layouts(layouts), content)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("what", ["row", "targets", "inside a larger message", "set of targets"])
def test_a_leak_would_be_caught(what: str, dtype: torch.dtype) -> None:
    steps = three_private_steps()
    secret = steps[1][0]
    content = {
        "row": secret.ids_BS[1, :11],
        "targets": secret.targets_N,
        "inside a larger message": torch.cat((torch.full((50,), 0.25), secret.ids_BS[0, 3:8].float())),
        "set of targets": secret.targets_N.unique(),
    }[what].to(dtype)
    heard: Heard = [[], []]

    def body(comm: Comm) -> None:
        comm.all_reduce(torch.randn(4, 5)).wait()
        comm.broadcast(content.clone() if comm.rank == OWNER else torch.empty_like(content), OWNER).wait()

    run_world(2, body, listener=recorder(heard))
    known = secrets([each for batches in steps for each in batches])
    assert [leaks(message, known, VOCAB) for _, message in heard[OWNER]] == [False, True]
    assert [leaks(message, known, VOCAB) for _, message in heard[1]] == [False]


def test_a_leak_in_disguise_would_be_caught() -> None:
    """Ids as the bytes of numbers that look like hidden states."""
    steps = three_private_steps()
    known = secrets([each for batches in steps for each in batches])
    assert leaks(steps[0][0].ids_BS[0].int().view(torch.float32), known, VOCAB)
    assert not leaks(torch.randn(1000, generator=torch.Generator().manual_seed(0)), known, VOCAB)
