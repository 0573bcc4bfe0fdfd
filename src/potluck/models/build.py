"""A device's chain, built from its share of a checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from potluck.chain.attention import Attention, kv_heads
from potluck.chain.embedding import AnyEmbedding, ReadRows
from potluck.chain.heads import AnyHead
from potluck.chain.joint_norm import JointlyNormedAttention, JointNorm
from potluck.chain.loss import Head
from potluck.chain.mlp import GatedMlp, Mlp
from potluck.chain.piece import Chain, Link, Replicated, Sharded
from potluck.chain.ranges import Ranges, joined
from potluck.chain.residual import AddNorm, AnyNorm
from potluck.chain.share import Share
from potluck.chain.trained_embedding import Table
from potluck.job_sections import Adapter
from potluck.models.cutting import Cutter
from potluck.models.families.decoder import Decoder
from potluck.models.sequence_head import build_classifier
from potluck.models.tables import embedding_of, head_of
from potluck.models.targets import targets_of
from potluck.models.trained_tables import trained_embedding, trained_head
from potluck.models.weights import Weights


@dataclass(frozen=True)
class Part:
    """What one device holds of a model, ready to walk."""

    chain: Chain
    head: AnyHead
    embedding: AnyEmbedding
    """Reads rows from disk, or has trained ones; used only by a device that has ids."""
    target_rows: ReadRows
    """Rows of the head by id, from disk; used only by a device that owns labels."""
    stream: torch.dtype
    """Dtype of the residual stream."""
    hidden_size: int
    weight_bytes: int
    """Memory of this device's weights, adapters included."""
    segments: bool = False
    """Whether tokens are of one of several segments, which the embedding tells apart."""


def build_part(
    checkpoint: Weights,
    decoder: Decoder,
    shares: Sequence[Share],
    rank: int,
    *,
    compute: torch.dtype,
    adapter: Adapter | None,
    seed: int,
    links: range | None = None,
    train_embeddings: bool = False,
) -> Part:
    """Read this rank's ranges, and no others, and make its chain.

    Args:
        checkpoint: the whole model, on disk as a rule.
        decoder: its family's description; of a head of whole sequences, the device that has the last link gets all.
        shares: what every rank holds; ranks must agree on it.
        rank: this device.
        compute: dtype of the linears; frozen weights are kept in it, trained ones in float32 or better.
        adapter: the adapters, or None for full fine-tuning (of embedding and head only with ``train_embeddings``).
        seed: from which adapters are drawn.
        links: which of the chain's links, as :func:`build_chain` counts them; all if None.
        train_embeddings: train the tables of the first stream, and with them a head that is one of them.

    Raises:
        BadInput: a target matches nothing, or the checkpoint has a head for another number of classes.
    """
    targets = targets_of(adapter, decoder) if adapter is not None else frozenset()
    cutter = Cutter(
        checkpoint, rank, compute, adapter, targets, seed, inputs_first=decoder.inputs_first, frozen=decoder.frozen
    )
    links = links or range(2 * len(decoder.layers))
    embedding: AnyEmbedding = embedding_of(checkpoint, decoder)
    tokens: Table | None = None
    if train_embeddings and links.start == 0:
        embedding = trained_embedding(cutter, decoder, shares)
        tokens = embedding.tokens
    first_trained = cutter.taken()
    chain = build_chain(decoder, shares, rank, compute, cutter, links)
    head: AnyHead
    if train_embeddings and decoder.embedding_is_head and links.stop == 2 * len(decoder.layers):
        head = trained_head(cutter, decoder, tokens)
    else:
        head = _head(checkpoint, decoder, shares[rank], compute, cutter, links)
    head_name = head_of(decoder)
    return Part(
        chain=replace(chain, last_trained=(*chain.last_trained, *cutter.taken()), first_trained=first_trained),
        head=head,
        embedding=embedding,
        target_rows=lambda ids: checkpoint.rows(head_name, ids, dtype=compute),
        stream=torch.promote_types(compute, torch.float32),
        hidden_size=decoder.hidden_size,
        weight_bytes=cutter.weight_bytes + (head.W_VD.nbytes if isinstance(head, Head) else 0),
        segments=decoder.segments > 1,
    )


def _head(
    checkpoint: Weights, decoder: Decoder, share: Share, compute: torch.dtype, cutter: Cutter, links: range
) -> AnyHead:
    if decoder.sequence is None:
        W_VD = checkpoint.read(head_of(decoder), dtype=compute, rows=share.vocab_rows)
        return Head(W_VD, decoder.logit_softcap)
    if links.stop == 2 * len(decoder.layers):
        return build_classifier(cutter, decoder, decoder.sequence)
    return Head(torch.empty(0, decoder.hidden_size, dtype=compute))  # of a stage that others follow


def build_chain(
    decoder: Decoder, shares: Sequence[Share], rank: int, compute: torch.dtype, cutter: Cutter, links: range
) -> Chain:
    """A row of links, all of the model's or some: link ``2 i`` is attention of block ``i``, ``2 i + 1`` its MLP.

    A part that begins behind another one is given the residual stream; one that ends before another one gives it, and
    the last one gives the normed input of the head. The cut is between the residual add and the norm that follows.
    """
    return _Builder(decoder, tuple(shares), rank, compute, cutter).chain(links)


@dataclass
class _Builder:
    decoder: Decoder
    shares: tuple[Share, ...]
    rank: int
    compute: torch.dtype
    cutter: Cutter
    norms: dict[str, AnyNorm] = field(default_factory=dict)
    """By name: attention and MLP that read the same have one norm."""

    def chain(self, numbers: range) -> Chain:
        d, n = self.decoder, self.decoder.names
        links = []
        added, norm_of_sum = None, None  # the linear whose partial sums reach the next replicated piece
        norm_of_stream = n.embedding_norm if numbers.start == 0 else None
        for number in numbers:
            i, is_mlp = divmod(number, 2)
            before, after = (n.before_mlp, n.after_mlp) if is_mlp else (n.before_attention, n.after_attention)
            # what the MLP reads is not what the attention wrote: so are both read from the stream of one link before
            before_sum = d.parallel and bool(is_mlp)
            piece = self._add_norm(i, before, added, norm_of_sum, norm_of_stream, before_sum=before_sum)
            links.append(self._link(piece, partial(self._mlp if is_mlp else self._attention, i)))
            added, norm_of_sum = (
                d.full_name(i, n.out if is_mlp else n.o),
                None if after is None else d.full_name(i, after),
            )
            of_stream = n.stream_after_mlp if is_mlp else n.stream_after_attention
            norm_of_stream = None if of_stream is None else d.full_name(i, of_stream)
        pointwise_from = len(links) - 1 if numbers and numbers[-1] % 2 else len(links)
        last = self._last(numbers, added, norm_of_sum, norm_of_stream)
        return Chain(tuple(links), last, pointwise_from, self.cutter.taken())

    def _link(self, replicated: Replicated, sharded: Callable[[], Sharded]) -> Link:
        replicated_trained = self.cutter.taken()
        return Link(replicated, sharded(), replicated_trained, self.cutter.taken())

    def _add_norm(
        self,
        i: int,
        norm: str | None,
        added: str | None,
        norm_of_sum: str | None,
        norm_of_stream: str | None,
        *,
        before_sum: bool,
    ) -> AddNorm:
        d = self.decoder
        return AddNorm(
            None if norm is None else self._norm(d.full_name(i, norm)),
            self.compute,
            None if added is None else self.cutter.row_bias(added),
            None if norm_of_sum is None else self._norm(norm_of_sum),
            scale=d.residual_scale,
            before_sum=before_sum,
            norm_of_stream=None if norm_of_stream is None else self._norm(norm_of_stream),
        )

    def _last(self, numbers: range, added: str | None, norm_of_sum: str | None, norm_of_stream: str | None) -> AddNorm:
        d = self.decoder
        at_head = numbers.stop == 2 * len(d.layers)
        return AddNorm(
            self._norm(d.names.last_norm) if at_head and d.names.last_norm is not None else None,
            self.compute if at_head else None,
            None if added is None else self.cutter.row_bias(added),
            None if norm_of_sum is None else self._norm(norm_of_sum),
            scale=d.residual_scale,
            h_scale=d.logit_scale if at_head else 1.0,
            norm_of_stream=None if norm_of_stream is None else self._norm(norm_of_stream),
        )

    def _norm(self, name: str) -> AnyNorm:
        """One of a name: attention and MLP may share theirs."""
        d = self.decoder
        if name not in self.norms:
            layer = d.norm == "layer"
            cutter = self.cutter
            norm = cutter.layer_norm(name, d.norm_eps) if layer else cutter.norm(name, d.norm_eps, d.norm_offset)
            self.norms[name] = norm
        return self.norms[name]

    def _attention(self, i: int) -> Attention | JointlyNormedAttention:
        d, n = self.decoder, self.decoder.names
        K, group = d.head_dim, d.num_heads // d.num_kv_heads
        queries = tuple(share.heads.scaled(K) for share in self.shares)
        needed = [kv_heads(list(share.heads), group) for share in self.shares]
        kv = [Ranges.covering(heads) for heads, _ in needed]
        keys = tuple(each.scaled(K) for each in kv)
        if len(n.qkv) == 3:
            held = [queries, keys, keys]
        elif d.by_head:
            held = [tuple(share.heads.scaled(3 * K) for share in self.shares)]
        else:
            first_k, first_v = d.num_heads * K, (d.num_heads + d.num_kv_heads) * K
            held = [
                tuple(joined(q, g.scaled(K, first_k), g.scaled(K, first_v)) for q, g in zip(queries, kv, strict=True))
            ]
        q_norm, k_norm = (self._head_norm(i, name) if d.head_norms == "each" else None for name in n.head_norms)
        attention = Attention(
            qkv=self.cutter.column([d.full_name(i, name) for name in n.qkv], held),
            o=self.cutter.row(d.full_name(i, n.o), queries),
            sizes=(len(queries[self.rank]), len(keys[self.rank]), len(keys[self.rank])),
            head_dim=K,
            scale=d.attention_scale,
            rope=d.layers[i].rope,
            kv_of_q_H=needed[self.rank][1],
            q_norm=q_norm,
            k_norm=k_norm,
            window=d.layers[i].window,
            softcap=d.attention_softcap,
            by_head=d.by_head,
            bidirectional=d.bidirectional,
        )
        if d.head_norms != "all":
            return attention
        of_queries, of_keys = n.head_norms
        return JointlyNormedAttention(
            attention,
            self._joint_norm(i, of_queries, queries, d.num_heads * K),
            self._joint_norm(i, of_keys, keys, d.num_kv_heads * K),
        )

    def _joint_norm(self, i: int, name: str, held: tuple[Ranges, ...], width: int) -> JointNorm:
        before = {element for ranges in held[: self.rank] for element in ranges}
        counted = [place for place, element in enumerate(held[self.rank]) if element not in before]
        weight_O = self.cutter.cut_norm(self.decoder.full_name(i, name), held)
        return JointNorm(weight_O, torch.tensor(counted, dtype=torch.long), width, self.decoder.norm_eps)

    def _head_norm(self, i: int, name: str) -> AnyNorm:
        d = self.decoder
        return self.cutter.norm(d.full_name(i, name), d.norm_eps, d.norm_offset, per_head=True)

    def _mlp(self, i: int) -> GatedMlp | Mlp:
        d, n = self.decoder, self.decoder.names
        columns = tuple(share.columns for share in self.shares)
        held = [columns] * len(n.into)
        if d.gated and len(n.into) == 1:
            held = [tuple(joined(each, each.scaled(1, d.intermediate_size)) for each in columns)]
        into = self.cutter.column([d.full_name(i, name) for name in n.into], held)
        out = self.cutter.row(d.full_name(i, n.out), columns)
        return (GatedMlp if d.gated else Mlp)(into, out, d.activation)
