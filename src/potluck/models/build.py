"""A device's chain, built from its share of a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from potluck.chain.attention import Attention, kv_heads
from potluck.chain.embedding import Embedding, ReadRows
from potluck.chain.loss import Head
from potluck.chain.mlp import GatedMlp
from potluck.chain.piece import Chain, Link, Replicated, Sharded
from potluck.chain.ranges import Ranges
from potluck.chain.residual import AddNorm
from potluck.chain.share import Share
from potluck.job import Lora
from potluck.models.cutting import Cutter
from potluck.models.families.decoder import Decoder
from potluck.models.targets import match_targets
from potluck.models.weights import Weights

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Part:
    """What one device holds of a model, ready to walk."""

    chain: Chain
    head: Head
    embedding: Embedding
    """Reads rows from disk; used only by a device that owns ids."""
    target_rows: ReadRows
    """Rows of the head by id, from disk; used only by a device that owns labels."""
    stream: torch.dtype
    """Dtype of the residual stream."""
    hidden_size: int
    weight_bytes: int
    """Memory of this device's weights, adapters included."""


def build_part(
    checkpoint: Weights,
    decoder: Decoder,
    shares: Sequence[Share],
    rank: int,
    *,
    compute: torch.dtype,
    lora: Lora | None,
    seed: int,
    links: range | None = None,
) -> Part:
    """Read this rank's ranges, and no others, and make its chain.

    Args:
        checkpoint: the whole model, on disk as a rule.
        decoder: its family's description.
        shares: what every rank holds; ranks must agree on it.
        rank: this device.
        compute: dtype of the linears; frozen weights are kept in it, trained ones in float32 or better.
        lora: the adapters, or None for full fine-tuning (embedding and head stay frozen).
        seed: from which adapters are drawn.
        links: which of the chain's links, as :func:`build_chain` counts them; all if None.

    Raises:
        BadInput: a target matches nothing.
    """
    targets = match_targets(lora.targets, decoder.linears) if lora is not None else frozenset()
    cutter = Cutter(checkpoint, rank, compute, lora, targets, seed)
    head_name = head_of(decoder)
    W_VD = checkpoint.read(head_name, dtype=compute, rows=shares[rank].vocab_rows)
    chain = build_chain(decoder, shares, rank, compute, cutter, links or range(2 * len(decoder.layers)))
    return Part(
        chain=chain,
        head=Head(W_VD, decoder.logit_softcap),
        embedding=Embedding(lambda ids: checkpoint.rows(EMBEDDING, ids), decoder.embedding_scale),
        target_rows=lambda ids: checkpoint.rows(head_name, ids, dtype=compute),
        stream=torch.promote_types(compute, torch.float32),
        hidden_size=decoder.hidden_size,
        weight_bytes=cutter.weight_bytes + W_VD.nbytes,
    )


def build_chain(
    decoder: Decoder, shares: Sequence[Share], rank: int, compute: torch.dtype, cutter: Cutter, links: range
) -> Chain:
    """A row of links, all of the model's or some: link ``2 i`` is attention of block ``i``, ``2 i + 1`` its MLP.

    A part that begins behind another one is given the residual stream; one that ends before another one gives it, and
    the last one gives the normed input of the head. The cut is between the residual add and the norm that follows.
    """
    return _Builder(decoder, tuple(shares), rank, compute, cutter).chain(links)


def head_of(decoder: Decoder) -> str:
    """Name of the tensor whose rows the last hidden states are compared with."""
    return EMBEDDING if decoder.tied else HEAD


def tables(decoder: Decoder) -> tuple[str, ...]:
    """Names of the tensors whose rows tell token ids: the embedding, and the head where it is another."""
    return (EMBEDDING,) if decoder.tied else (EMBEDDING, HEAD)


@dataclass
class _Builder:
    decoder: Decoder
    shares: tuple[Share, ...]
    rank: int
    compute: torch.dtype
    cutter: Cutter

    def chain(self, numbers: range) -> Chain:
        links = []
        sum_of, norm_of_sum = None, None  # the linear whose partial sums reach the next replicated piece
        for number in numbers:
            i, is_mlp = divmod(number, 2)
            at = f"model.layers.{i}"
            norms = [f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
            norms_of_sums: list[str | None] = [None, None]
            if self.decoder.norms_of_sums:
                norms_of_sums = [f"{at}.post_attention_layernorm", f"{at}.post_feedforward_layernorm"]
                norms[1] = f"{at}.pre_feedforward_layernorm"
            before = self._add_norm(norms[is_mlp], sum_of, norm_of_sum)
            links.append(self._link(before, partial(self._mlp if is_mlp else self._attention, i)))
            sum_of, norm_of_sum = f"{at}.mlp.down_proj" if is_mlp else f"{at}.self_attn.o_proj", norms_of_sums[is_mlp]
        is_last = numbers.stop == 2 * len(self.decoder.layers)
        last = self._add_norm("model.norm" if is_last else None, sum_of, norm_of_sum)
        pointwise_from = len(links) - 1 if numbers and numbers[-1] % 2 else len(links)
        return Chain(tuple(links), last, pointwise_from, self.cutter.taken())

    def _link(self, replicated: Replicated, sharded: Callable[[], Sharded]) -> Link:
        replicated_trained = self.cutter.taken()
        return Link(replicated, sharded(), replicated_trained, self.cutter.taken())

    def _add_norm(self, norm: str | None, sum_of: str | None, norm_of_sum: str | None) -> AddNorm:
        eps, offset = self.decoder.norm_eps, self.decoder.norm_offset
        return AddNorm(
            None if norm is None else self.cutter.norm(norm, eps, offset),
            self.compute,
            None if sum_of is None else self.cutter.row_bias(sum_of),
            None if norm_of_sum is None else self.cutter.norm(norm_of_sum, eps, offset),
        )

    def _attention(self, i: int) -> Attention:
        d, at = self.decoder, f"model.layers.{i}.self_attn"
        queries = tuple(share.heads.scaled(d.head_dim) for share in self.shares)
        group = d.num_heads // d.num_kv_heads
        needed = [kv_heads(list(share.heads), group) for share in self.shares]
        keys = tuple(Ranges.covering(kv).scaled(d.head_dim) for kv, _ in needed)
        eps, offset = d.norm_eps, d.norm_offset
        return Attention(
            qkv=self.cutter.column([f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"], [queries, keys, keys]),
            o=self.cutter.row(f"{at}.o_proj", queries),
            head_dim=d.head_dim,
            scale=d.attention_scale,
            rope=d.layers[i].rope,
            kv_of_q_H=needed[self.rank][1],
            q_norm=self.cutter.norm(f"{at}.q_norm", eps, offset, per_head=True) if d.head_norms else None,
            k_norm=self.cutter.norm(f"{at}.k_norm", eps, offset, per_head=True) if d.head_norms else None,
            window=d.layers[i].window,
        )

    def _mlp(self, i: int) -> GatedMlp:
        at = f"model.layers.{i}.mlp"
        columns = tuple(share.columns for share in self.shares)
        return GatedMlp(
            gate_up=self.cutter.column([f"{at}.gate_proj", f"{at}.up_proj"], [columns, columns]),
            down=self.cutter.row(f"{at}.down_proj", columns),
            activation=self.decoder.activation,
        )
