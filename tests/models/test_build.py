"""A device's part: what it reads, in which dtype, and the adapters it starts from."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from pool.tiny import config, save_tiny, shares
from potluck.chain.attention import Attention
from potluck.chain.mlp import GatedMlp
from potluck.errors import BadInput
from potluck.job_sections import Lora
from potluck.models.build import Part, build_part
from potluck.models.checkpoint import Checkpoint
from potluck.models.families import decoder_of

CFG = config("llama", tie_word_embeddings=False)
COUNTS = ([5, 4, 0], [20, 0, 6], [31, 30, 0])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(CFG, tmp_path_factory.mktemp("model"))


def built(
    model_dir: Path, rank: int, *, lora: Lora | None = None, compute: torch.dtype = torch.float32, seed: int = 0
) -> tuple[Part, int]:
    """The part, and the bytes read for it."""
    with Checkpoint.open(model_dir) as checkpoint:
        plan = shares(CFG, *COUNTS)
        part = build_part(checkpoint, decoder_of(CFG), plan, rank, compute=compute, adapter=lora, seed=seed)
        return part, checkpoint.bytes_read


def adapters(part: Part) -> dict[str, Tensor]:
    return {t.name: t.local.detach() for t in part.chain.trained}


def elements(rank: int) -> int:
    """What a rank must hold of the base model: 45 wide, two blocks, heads of 8, three query heads a kv head."""
    heads, columns, rows = (counts[rank] for counts in COUNTS)
    kv_heads = {5: 2, 4: 2, 0: 0}[heads]
    return 2 * (45 * 8 * (2 * heads + 2 * kv_heads) + 3 * 45 * columns + 2 * 45) + 45 + 45 * rows


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_device_reads_and_keeps_its_ranges_and_no_others(model_dir: Path, rank: int) -> None:
    lora = Lora(rank=4)
    part, bytes_read = built(model_dir, rank, lora=lora)
    assert bytes_read == elements(rank) * torch.float64.itemsize
    own = sum(tensor.nbytes for tensor in adapters(part).values())
    assert part.weight_bytes == elements(rank) * torch.float32.itemsize + own
    assert part.head.W_VD.shape == (COUNTS[2][rank], 45)


def test_adapters_start_alike_whatever_the_shares(model_dir: Path) -> None:
    lora = Lora(rank=4)
    parts = [adapters(built(model_dir, rank, lora=lora)[0]) for rank in range(3)]
    assert parts[0].keys() == parts[1].keys() == parts[2].keys()
    assert len(parts[0]) == 2 * 7 * 2
    for name, first in parts[0].items():
        everywhere = [part[name] for part in parts]
        if "lora_B" in name:
            assert all(torch.equal(B, torch.zeros_like(B)) for B in everywhere)
        elif "o_proj" in name or "down_proj" in name:
            whole = torch.cat(everywhere, 1)
            inputs = 72 if "o_proj" in name else 26
            assert whole.shape == (4, inputs)
            assert 0.8 * inputs**-0.5 < whole.abs().max() <= inputs**-0.5
            assert whole.unique().numel() == whole.numel()
        else:
            assert first.shape == (4, 45)
            assert all(torch.equal(first, other) for other in everywhere)
    drawn = [tensor for name, tensor in parts[0].items() if "lora_A" in name and tensor.shape == (4, 45)]
    assert len({tuple(tensor.flatten().tolist()) for tensor in drawn}) == len(drawn)


def test_adapters_follow_the_seed(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    first, again, other = (adapters(built(model_dir, 0, lora=Lora(), seed=seed)[0])[name] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("train", ["lora", "full"])
def test_linears_are_kept_in_the_compute_dtype_and_what_is_trained_in_float32(model_dir: Path, train: str) -> None:
    part, _ = built(model_dir, 0, lora=Lora() if train == "lora" else None, compute=torch.bfloat16)
    assert {t.local.dtype for t in part.chain.trained} == {torch.float32}
    assert all(t.local.requires_grad and t.local.is_leaf for t in part.chain.trained)
    assert part.head.W_VD.dtype == torch.bfloat16
    assert part.stream == torch.float32
    attention, mlp = (link.sharded for link in part.chain.links[:2])
    assert isinstance(attention, Attention)
    assert isinstance(mlp, GatedMlp)
    kept = {weight.dtype for linears in (attention.qkv, attention.o, mlp.down) for weight in linears.weights_OI}
    assert kept == {torch.bfloat16 if train == "lora" else torch.float32}


def test_the_owner_looks_targets_up_in_the_rows_the_head_has(model_dir: Path) -> None:
    """Rounded alike: a target's row must cancel against its own row in the gradient."""
    with Checkpoint.open(model_dir) as checkpoint:
        plan = shares(CFG, *COUNTS)
        part = build_part(checkpoint, decoder_of(CFG), plan, 0, compute=torch.bfloat16, adapter=Lora(), seed=0)
        assert torch.equal(part.target_rows([3, 30, 0]), part.head.W_VD[[3, 30, 0]])
        assert part.target_rows([]).shape == (0, 45)


def test_every_trained_tensor_is_of_the_kind_its_holders_make_it(model_dir: Path) -> None:
    kinds = {
        t.name.removeprefix("model.layers.0."): t.gradient for t in built(model_dir, 0, lora=Lora())[0].chain.trained
    }
    assert kinds["self_attn.q_proj.lora_A.weight"] == "partial"
    assert kinds["self_attn.q_proj.lora_B.weight"] == "cut"
    assert kinds["self_attn.k_proj.lora_B.weight"] == "partial", "heads 3 to 5 share a kv head over two devices"
    assert kinds["self_attn.o_proj.lora_A.weight"] == "cut"
    assert kinds["self_attn.o_proj.lora_B.weight"] == "partial"
    full = {t.name.removeprefix("model.layers.0."): t.gradient for t in built(model_dir, 0)[0].chain.trained}
    assert full["input_layernorm.weight"] == "equal"
    assert full["self_attn.q_proj.weight"] == "cut"
    assert full["self_attn.v_proj.weight"] == "partial"
    assert full["mlp.down_proj.weight"] == "cut"


def test_a_target_that_matches_nothing_is_refused(model_dir: Path) -> None:
    with pytest.raises(BadInput, match="'c_attn' matches no linear"):
        built(model_dir, 0, lora=Lora(targets=["c_attn"]))
