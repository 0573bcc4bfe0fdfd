"""What a family says about itself: everything the builder needs to walk a model of it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from potluck.chain.attention import Rope
from potluck.chain.classifier import Kind
from potluck.errors import BadInput
from potluck.models.families.activations import activation

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Cut = Literal["column", "row"]


@dataclass(frozen=True)
class ClassifierNames:
    """transformers' names of the head of whole sequences, without ``.weight``."""

    out: str = "score"
    biased: bool = False
    hidden: str | None = None
    """The layer before, in families that have one; it has a bias."""
    hidden_of_base: bool = False
    """Whether that layer is one of the model without its head."""


@dataclass(frozen=True)
class SequenceHead:
    """What is told of a whole sequence."""

    kind: Kind
    size: int
    """Classes; 1 for a value."""


@dataclass(frozen=True)
class Names:
    """transformers' names of a family's tensors, without ``.weight``; those of a block follow the block's number."""

    blocks: str = "model.layers"
    embedding: str = "model.embed_tokens"
    positions: str | None = None
    """Table of learned positions."""
    types: str | None = None
    """Table of segments."""
    embedding_norm: str | None = None
    """Norm of the first residual stream."""
    last_norm: str | None = "model.norm"
    head: str = "lm_head"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Query, key and value; one name where one linear gives all three."""
    o: str = "self_attn.o_proj"
    into: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """What the MLP's columns come from: gate and up, one linear that gives both, or one without a gate."""
    out: str = "mlp.down_proj"
    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    """Norm of the attention's output before it is added."""
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    stream_after_attention: str | None = None
    """Norm of the stream with the attention's output added: what goes on is what has been normed."""
    stream_after_mlp: str | None = None
    classifier: ClassifierNames | None = ClassifierNames()
    """None where transformers has no such head for the family."""
    head_norms: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm")


@dataclass(frozen=True)
class Layer:
    """Where one block differs from the others."""

    rope: Rope | None
    """None where queries and keys are not turned."""
    window: int | None = None
    """Positions a token sees back, itself included; None for all."""


@dataclass(frozen=True)
class Decoder:
    """A model of blocks of attention and MLP: a decoder, or an encoder where ``bidirectional``."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    layers: tuple[Layer, ...]
    attention_scale: float
    norm_eps: float
    activation: Callable[[Tensor], Tensor]
    tied: bool
    max_positions: int
    biased: tuple[str, ...] = ()
    """Linears of a block that have a bias."""
    names: Names = Names()
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    """Added to a norm's weight."""
    head_norms: Literal["none", "each", "all"] = "none"
    """Whether queries and keys are normed: each head by itself, or all heads together."""
    gated: bool = True
    """Whether the MLP multiplies its activated columns by others."""
    by_head: bool = False
    """Whether one linear gives query, key and value of the first head, then those of the second, and so on."""
    inputs_first: bool = False
    """Whether linears are stored as ``[in, out]``."""
    parallel: bool = False
    """Whether the MLP reads what the attention reads, and not what it has written."""
    position_offset: int = 0
    """Row of the first position in the table of learned positions."""
    embedding_scale: float = 1.0
    padding: int | None = None
    """The token whose row of the embedding learns nothing from being looked up, in transformers' models."""
    residual_scale: float = 1.0
    """What attention and MLP add is multiplied by it."""
    attention_softcap: float | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    bidirectional: bool = False
    """Whether each position sees all others."""
    segments: int = 1
    """Rows of the table of segments."""
    initializer_range: float = 0.02
    """Standard deviation of a new head's weights."""
    sequence: SequenceHead | None = None
    """What the model is to tell of whole sequences; None where it says tokens."""
    frozen_blocks: int = 0
    """So many of the first blocks, and all that lies before them, are not trained."""

    @property
    def embedding_is_head(self) -> bool:
        """Whether the rows that tokens are looked up in are those that hidden states are compared with."""
        return self.tied and self.sequence is None

    @property
    def head_rows(self) -> int:
        """Vocabulary rows of the head, which devices share."""
        return self.vocab_size if self.sequence is None else 0

    @property
    def cuts(self) -> dict[str, Cut]:
        """For each linear of a block, how it is cut."""
        names = self.names
        cuts: dict[str, Cut] = dict.fromkeys(names.qkv, "column")
        return cuts | {names.o: "row"} | dict.fromkeys(names.into, "column") | {names.out: "row"}

    @property
    def links_together(self) -> int:
        """Links between which the chain is not divided: where a block's MLP reads what its attention has read, both."""
        return 2 if self.parallel else 1

    @property
    def linears(self) -> list[str]:
        """Full names of all linears that can be trained, in order."""
        return [self.full_name(i, name) for i in range(self.frozen_blocks, len(self.layers)) for name in self.cuts]

    @property
    def frozen_linears(self) -> list[str]:
        """Full names of those in frozen blocks."""
        return [self.full_name(i, name) for i in range(self.frozen_blocks) for name in self.cuts]

    @property
    def frozen(self) -> tuple[str, ...]:
        """What the names of all tensors begin with that are frozen with the first blocks."""
        if not self.frozen_blocks:
            return ()
        before = () if self.names.embedding_norm is None else (f"{self.names.embedding_norm}.",)
        return (*before, *(self.full_name(i, "") for i in range(self.frozen_blocks)))

    def full_name(self, i: int, name: str) -> str:
        """The full name of what block ``i`` calls ``name``."""
        return f"{self.names.blocks}.{i}.{name}"

    def within_block(self, full_name: str) -> str:
        """What its block calls a linear: the inverse of :meth:`full_name`."""
        return full_name.removeprefix(f"{self.names.blocks}.").partition(".")[2]

    def units(self, name: str) -> tuple[int, int, int]:
        """Rows or columns of one of a block's linears by query head, by key/value head, and by MLP column."""
        names, K = self.names, self.head_dim
        if name == names.o or name == names.qkv[0]:
            return K, 2 * K if name in names.qkv and len(names.qkv) == 1 else 0, 0
        if name in names.qkv:
            return 0, K, 0
        return 0, 0, 2 if self.gated and name in names.into and len(names.into) == 1 else 1

    def norm_names(self) -> Iterator[str]:
        """Names of a block's norms of the residual stream and of sums."""
        n = self.names
        yield from filter(None, (n.before_attention, n.after_attention, n.before_mlp, n.after_mlp))
        yield from filter(None, (n.stream_after_attention, n.stream_after_mlp))


def decoder(config: "PretrainedConfig", layers: tuple[Layer, ...], **differs: Any) -> Decoder:
    """A decoder read from the fields most families share; ``differs`` sets the rest.

    Raises:
        BadInput: the activation is unknown, the heads do not divide, or the padding id is no token.
    """
    heads = config.num_attention_heads
    kv_heads = differs.get("num_kv_heads") or getattr(config, "num_key_value_heads", None) or heads
    act = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if heads % kv_heads:
        raise BadInput(f"The model's config has {heads} query heads, which {kv_heads} key/value heads do not divide.")
    head_dim = differs.get("head_dim") or getattr(config, "head_dim", None) or config.hidden_size // heads
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": getattr(config, "intermediate_size", None),
        "vocab_size": config.vocab_size,
        "layers": layers,
        "attention_scale": head_dim**-0.5,
        "norm_eps": getattr(config, "rms_norm_eps", None),
        "tied": bool(config.tie_word_embeddings),
        "max_positions": config.max_position_embeddings,
        "initializer_range": getattr(config, "initializer_range", None) or getattr(config, "init_std", None) or 0.02,
    }
    fields |= differs
    if "padding" not in differs:
        fields["padding"] = _padding_row(config.pad_token_id, fields["vocab_size"])
    if "activation" not in differs:
        fields["activation"] = activation(act)
    return Decoder(**fields)


def _padding_row(pad_token_id: int | None, vocab_size: int) -> int | None:
    """The row of the embedding that a padding id names; negative ones count from the end, as in ``nn.Embedding``."""
    if pad_token_id is None:
        return None
    if not -vocab_size <= pad_token_id < vocab_size:
        raise BadInput(
            f"The model's config has pad_token_id {pad_token_id}, which is no row of an embedding of vocab_size"
            f" {vocab_size}, so that transformers cannot build it: set pad_token_id in config.json to one of its"
            " tokens, or to null."
        )
    return pad_token_id if pad_token_id >= 0 else vocab_size + pad_token_id


def one_key_a_query(config: "PretrainedConfig") -> dict[str, int]:
    """Of families whose heads divide ``hidden_size`` and share no keys, whatever else their config may hold.

    Raises:
        BadInput: they do not divide it.
    """
    heads = config.num_attention_heads
    if config.hidden_size % heads:
        raise BadInput(f"The model's config has hidden_size {config.hidden_size}, which {heads} heads do not divide.")
    return {"num_kv_heads": heads, "head_dim": config.hidden_size // heads}


def biased_linears(config: "PretrainedConfig") -> tuple[str, ...]:
    """The linears with a bias, in families named like Llama whose ``attention_bias`` and ``mlp_bias`` say so."""
    names = Names()
    attention = (*names.qkv, names.o) if getattr(config, "attention_bias", False) else ()
    return (*attention, *((*names.into, names.out) if getattr(config, "mlp_bias", False) else ()))


def layer_types_of(config: "PretrainedConfig") -> list[str]:
    """The kind of attention of each block, in families whose blocks differ."""
    return list(config.layer_types or [])
