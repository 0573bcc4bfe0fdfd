"""What a family of decoders says about itself: everything the builder needs beyond tensor names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from transformers import PretrainedConfig
from transformers.activations import ACT2FN

from potluck.chain.attention import Rope
from potluck.errors import BadInput

Cut = Literal["column", "row"]

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@dataclass(frozen=True)
class Layer:
    """Where one block differs from the others."""

    rope: Rope
    window: int | None = None
    """Positions a token sees back, itself included; None for all."""


@dataclass(frozen=True)
class Decoder:
    """A decoder of gated-MLP blocks with rotary attention, in transformers' tensor names."""

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
    cuts: dict[str, Cut]
    """For each linear of a block (``self_attn.q_proj``), how it is cut."""
    norm_offset: float = 0.0
    """Added to a norm's weight."""
    norms_of_sums: bool = False
    """Whether the outputs of attention and MLP are normed before they are added."""
    head_norms: bool = False
    """Whether each query and key head is normed."""
    embedding_scale: float = 1.0
    logit_softcap: float | None = None

    @property
    def linears(self) -> list[str]:
        """Full names of all linears that can be trained, in order."""
        return [f"model.layers.{i}.{name}" for i in range(len(self.layers)) for name in self.cuts]


def decoder(config: PretrainedConfig, layers: tuple[Layer, ...], **differs: Any) -> Decoder:
    """A decoder read from the fields all families share; ``differs`` sets the rest.

    Raises:
        BadInput: the activation is unknown, or the heads do not divide.
    """
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    act = getattr(config, "hidden_act", None) or config.hidden_activation
    if act not in ACT2FN:
        raise BadInput(f"The model's config names the activation '{act}', which transformers does not know.")
    if config.num_attention_heads % config.num_key_value_heads:
        raise BadInput(
            f"The model's config has {config.num_attention_heads} query heads, which {config.num_key_value_heads}"
            " key/value heads do not divide."
        )
    fields: dict[str, Any] = {
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "num_kv_heads": config.num_key_value_heads,
        "head_dim": head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "layers": layers,
        "attention_scale": head_dim**-0.5,
        "norm_eps": config.rms_norm_eps,
        "activation": ACT2FN[act],
        "tied": bool(config.tie_word_embeddings),
        "max_positions": config.max_position_embeddings,
        "cuts": cuts_of(config),
    }
    return Decoder(**fields | differs)


def cuts_of(config: PretrainedConfig) -> dict[str, Cut]:
    """How each linear of a block is cut, from the tensor-parallel plan transformers carries for the family."""
    plan: dict[str, str] = config.base_model_tp_plan or {}
    kinds: dict[str, Cut] = {"colwise": "column", "rowwise": "row"}
    return {name: kinds[plan[f"layers.*.{name}"]] for name in (*ATTENTION, *MLP)}


def layer_types_of(config: PretrainedConfig) -> list[str]:
    """The kind of attention of each block, in families whose blocks differ."""
    return list(config.layer_types or [])
