"""Attention by explicit head map against the textbook, and inside stock transformers."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from pool.tiny import VOCAB, config
from potluck.chain.attention import Attention, attend, kv_heads, register_with_transformers, rotate
from potluck.chain.linear import CutLinears
from potluck.chain.piece import At

HERE = At(seed=0, step=0, micro_batch=0, half=0)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def textbook(q_SK: Tensor, k_SK: Tensor, v_SK: Tensor, scale: float, allowed_SS: Tensor) -> Tensor:
    return (q_SK @ k_SK.T * scale).masked_fill(~allowed_SS, -math.inf).softmax(-1) @ v_SK


@given(
    kv_of_q=st.integers(1, 4).flatmap(lambda G: st.lists(st.integers(0, G - 1), max_size=7).map(lambda m: (G, m))),
    S=st.integers(1, 6),
    window=st.none() | st.integers(1, 4),
)
@settings(deadline=None, max_examples=60)
def test_each_query_head_reads_the_head_it_is_mapped_to(
    kv_of_q: tuple[int, list[int]], S: int, window: int | None
) -> None:
    G, heads = kv_of_q
    q, k, v = random(2, len(heads), S, 4), random(2, G, S, 4, seed=1), random(2, G, S, 4, seed=2)
    back_SS = torch.arange(S)[:, None] - torch.arange(S)
    allowed_SS = (back_SS >= 0) & (back_SS < (window or S))
    mask = None if window is None else allowed_SS
    y_BHSK = attend(q, k, v, torch.tensor(heads, dtype=torch.long), scale=0.7, mask=mask)
    assert y_BHSK.shape == q.shape
    for b in range(2):
        for h, g in enumerate(heads):
            assert torch.allclose(y_BHSK[b, h], textbook(q[b, h], k[b, g], v[b, g], 0.7, allowed_SS), atol=1e-12)


def test_no_map_reads_head_by_head_and_no_heads_give_none() -> None:
    q, k, v = (random(1, 3, 5, 4, seed=seed) for seed in range(3))
    assert torch.equal(attend(q, k, v, None, scale=1.0), attend(q, k, v, torch.arange(3), scale=1.0))
    nothing = [part[:, :0].requires_grad_() for part in (q, k, v)]
    assert attend(*nothing, None, scale=1.0).shape == (1, 0, 5, 4)
    attend(*nothing, torch.zeros(0, dtype=torch.long), scale=1.0).sum().backward()


def test_bfloat16_comes_back_as_bfloat16() -> None:
    q, k, v = (random(1, 3, 5, 4, seed=seed) for seed in range(3))
    narrow = attend(q.bfloat16(), k.bfloat16(), v.bfloat16(), None, scale=0.5)
    assert narrow.dtype == torch.bfloat16
    assert torch.allclose(narrow.double(), attend(q, k, v, None, scale=0.5), atol=0.05)


@given(st.sets(st.integers(0, 11)), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_kv_heads_of_any_query_heads(heads: set[int], group: int) -> None:
    queries = sorted(heads)
    needed, kv_of_q_H = kv_heads(queries, group)
    assert needed == sorted({head // group for head in queries})
    local = list(range(len(needed))) if kv_of_q_H is None else kv_of_q_H.tolist()
    assert [needed[i] for i in local] == [head // group for head in queries]


def angles(S: int, K: int) -> tuple[Tensor, Tensor]:
    half = random(S, K // 2, seed=7)
    return torch.cat((half.cos(), half.cos()), -1), torch.cat((half.sin(), half.sin()), -1)


def test_gradient_of_the_rotation() -> None:
    cos_SK, sin_SK = angles(3, 6)
    x_BSHK = random(2, 3, 2, 6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos_SK, sin_SK), (x_BSHK,))


def test_the_rotation_turns_pairs_and_keeps_lengths() -> None:
    cos_SK, sin_SK = angles(3, 6)
    x_BSHK = random(2, 3, 2, 6)
    as_complex = torch.complex(x_BSHK[..., :3], x_BSHK[..., 3:])
    turn_S1K = torch.complex(cos_SK, sin_SK)[:, None, :3]
    turned = rotate(x_BSHK, cos_SK, sin_SK)
    assert torch.allclose(torch.complex(turned[..., :3], turned[..., 3:]), as_complex * turn_S1K, atol=1e-12)
    assert torch.allclose(turned.norm(dim=-1), x_BSHK.norm(dim=-1), atol=1e-12)


def piece(
    heads: list[int], group: int, window: int | None, D: int = 6, K: int = 4, *, bidirectional: bool = False
) -> Attention:
    needed, kv_of_q_H = kv_heads(heads, group)
    q_OI, kv_OI, o_OI = random(12 * K, D, seed=1), random(2 * 12 * K, D, seed=2), random(D, 12 * K, seed=3)
    rows = [h * K + k for h in heads for k in range(K)]
    kv_rows = [g * K + k for g in needed for k in range(K)]
    weights = (q_OI[rows], kv_OI[: 12 * K][kv_rows], kv_OI[12 * K :][kv_rows])
    return Attention(
        qkv=CutLinears("qkv", weights, (None, None, None), tuple(len(weight) for weight in weights)),
        o=CutLinears("o", (o_OI[:, rows],), (None,), (D,), cut_input_of=0),
        sizes=(len(rows), len(kv_rows), len(kv_rows)),
        head_dim=K,
        scale=0.5,
        rope=lambda S, dtype: angles(S, K),
        kv_of_q_H=kv_of_q_H,
        window=window,
        bidirectional=bidirectional,
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_both_ways_every_position_reads_all_others(softcap: float | None) -> None:
    q, k, v = (random(1, 1, 5, 4, seed=seed) for seed in range(3))
    scores_SS = q[0, 0] @ k[0, 0].T * 0.5
    if softcap is not None:
        scores_SS = torch.tanh(scores_SS / softcap) * softcap
    found = attend(q, k, v, None, scale=0.5, causal=False, softcap=softcap)
    assert torch.allclose(found[0, 0], scores_SS.softmax(-1) @ v[0, 0], atol=1e-12)


def test_both_ways_padding_is_hidden() -> None:
    both_ways = piece([0, 1, 2, 5], 3, None, bidirectional=True)
    h_BSD, lengths = random(3, 5, 6, seed=9), [5, 2, 3]
    alone = [both_ways(h_BSD[row : row + 1, :length], HERE)[0] for row, length in enumerate(lengths)]
    for padding in (0.0, 1e3):
        padded = h_BSD.clone()
        for row, length in enumerate(lengths):
            padded[row, length:] = padding
        found = both_ways(padded, replace(HERE, lengths_B=torch.tensor(lengths)))
        for row, length in enumerate(lengths):
            assert torch.allclose(found[row, :length], alone[row], atol=1e-10)


@pytest.mark.parametrize("window", [None, 1, 2, 3, 5, 6])
def test_partial_sums_of_any_heads_add_up_to_the_whole(window: int | None) -> None:
    h_BSD = random(2, 5, 6, seed=9)
    whole = piece(list(range(12)), 3, window)(h_BSD, HERE)
    parts = [piece(heads, 3, window)(h_BSD, HERE) for heads in ([0, 1, 2, 3], [4, 7, 10], [], [5, 6, 8, 9, 11])]
    assert torch.equal(parts[2], torch.zeros_like(whole))
    assert torch.allclose(torch.stack(parts).sum(0), whole, atol=1e-10)


@pytest.mark.parametrize("window", [1, 2, 3])
def test_a_window_hides_what_lies_further_back(window: int) -> None:
    h_BSD = random(1, 6, 6, seed=9)
    changed = h_BSD.clone()
    changed[:, 1] += 1.0
    before, after = (piece([0, 1, 2], 3, window)(h, HERE) for h in (h_BSD, changed))
    differs = ((before - after).abs().amax(-1)[0] > 1e-9).tolist()
    assert differs == [1 <= s < 1 + window for s in range(6)]


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3"])
def test_stock_transformers_with_our_attention(family: str) -> None:
    name = register_with_transformers()
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config(family), attn_implementation="sdpa").double().eval()
    ours = AutoModelForCausalLM.from_config(config(family), attn_implementation=name).double().eval()
    ours.load_state_dict(plain.state_dict())
    assert ours.config._attn_implementation == "potluck"
    ids_BS = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(1))
    right, left = torch.ones_like(ids_BS), torch.ones_like(ids_BS)
    right[1, 6:] = right[2, 4:] = 0
    left[0, :5] = left[2, :2] = 0
    with torch.no_grad():
        for mask in (None, right, left):
            found = ours(input_ids=ids_BS, attention_mask=mask).logits
            expected = plain(input_ids=ids_BS, attention_mask=mask).logits
            seen = torch.ones_like(ids_BS).bool() if mask is None else mask.bool()
            assert torch.allclose(found[seen], expected[seen], atol=1e-6)
        options = {"attention_mask": left, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(ours.generate(ids_BS, **options), plain.generate(ids_BS, **options))
