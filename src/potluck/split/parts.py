"""The two parts of a model that is divided at a block: the client's, and the server's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.chain.embedding import Embedding, ReadRows
from potluck.chain.piece import At
from potluck.chain.ranges import Ranges
from potluck.chain.share import Share
from potluck.chain.trained import Trained
from potluck.chain.whole import Whole
from potluck.errors import BadInput
from potluck.job_sections import Adapter, Lora
from potluck.models.build import build_chain
from potluck.models.cutting import Cutter
from potluck.models.families.decoder import Decoder
from potluck.models.tables import embedding_of, head_of
from potluck.models.targets import targets_of
from potluck.models.weights import Weights


@dataclass(frozen=True)
class SplitPart:
    """A row of blocks that one side holds whole."""

    module: Whole
    trained: tuple[Trained, ...]
    hidden_size: int
    stream: torch.dtype
    """Dtype of the residual stream."""
    weight_bytes: int

    def tensors(self) -> dict[str, Tensor]:
        """What is trained here, by its name in the whole model."""
        return {t.name: t.local.detach() for t in self.trained}


@dataclass(frozen=True)
class ClientPart:
    """Embedding and the blocks before the cut."""

    part: SplitPart
    embedding: Embedding
    target_rows: ReadRows
    """Rows of the head by id, read from disk."""
    head: Callable[[torch.dtype], Tensor]
    """Reads the whole head, for a client that computes the loss."""

    def __call__(self, ids_BS: Tensor, kept_N: Tensor, at: At) -> Tensor:
        """The residual stream ``[N, D]`` behind block ``cut - 1`` at the kept ones of the ``B * S`` positions."""
        stream: Tensor = self.part.module(self.embedding(ids_BS, self.part.stream), kept_N, at)
        return stream


def check_cut(decoder: Decoder, cut: int) -> None:
    """See whether a model can be divided before block ``cut``.

    Raises:
        BadInput: it has too few blocks, or is an encoder.
    """
    layers = len(decoder.layers)
    if decoder.bidirectional:
        raise BadInput("split trains causal-lm only, and this model is an encoder, which says no tokens.")
    if layers == 1:
        raise BadInput("The model has one block, which cannot be divided between clients and a server.")
    if not 0 < cut < layers:
        raise BadInput(f"split.cut is {cut}, but the model has {layers} blocks: 1 to {layers - 1} can be cut off.")


def client_part(
    weights: Weights, decoder: Decoder, cut: int, *, compute: torch.dtype, adapter: Adapter | None, seed: int
) -> ClientPart:
    """Build the client's part; of the tables nothing is read before a row is asked for.

    Args:
        weights: the whole model, or what is fetched of it.
        decoder: its family's description.
        cut: blocks on the client's side.
        compute: dtype of the linears.
        adapter: adapters of a trainable client; None for a frozen one.
        seed: from which adapters are drawn; tensors begin as those of a whole model of this seed.

    Raises:
        BadInput: the model has too few blocks.
    """
    check_cut(decoder, cut)
    part = _part(weights, decoder, range(cut), compute, adapter, seed, torch.device("cpu"), checkpointing=False)
    head = head_of(decoder)
    return ClientPart(
        part,
        embedding_of(weights, decoder),
        lambda ids: weights.rows(head, ids),
        lambda dtype: weights.read(head, dtype=dtype),
    )


def server_part(
    weights: Weights,
    decoder: Decoder,
    cut: int,
    *,
    compute: torch.dtype,
    adapter: Adapter | None,
    seed: int,
    device: torch.device | None = None,
    checkpointing: bool = False,
) -> SplitPart:
    """Build the blocks from ``cut`` on and the final norm, with adapters; neither embedding nor head is read.

    Raises:
        BadInput: the model has too few blocks, or a target of the adapters matches nothing.
    """
    check_cut(decoder, cut)
    blocks = range(cut, len(decoder.layers))
    device = device or torch.device("cpu")
    return _part(weights, decoder, blocks, compute, adapter, seed, device, checkpointing=checkpointing)


def _part(
    weights: Weights,
    decoder: Decoder,
    blocks: range,
    compute: torch.dtype,
    adapter: Adapter | None,
    seed: int,
    device: torch.device,
    *,
    checkpointing: bool,
) -> SplitPart:
    whole = Share(
        Ranges.of(0, decoder.num_heads), Ranges.of(0, decoder.intermediate_size), Ranges.of(0, decoder.vocab_size)
    )
    targets = frozenset() if adapter is None else targets_of(adapter, decoder)
    placed = weights if device.type == "cpu" else _Placed(weights, device)
    cutter = Cutter(placed, 0, compute, adapter or Lora(), targets, seed, device, decoder.inputs_first)
    chain = build_chain(decoder, [whole], 0, compute, cutter, range(2 * blocks.start, 2 * blocks.stop))
    return SplitPart(
        Whole(chain, checkpointing=checkpointing),
        tuple(chain.trained),
        decoder.hidden_size,
        torch.promote_types(compute, torch.float32),
        cutter.weight_bytes,
    )


@dataclass(frozen=True)
class _Placed:
    """Weights that are read onto an accelerator."""

    weights: Weights
    device: torch.device

    @property
    def names(self) -> tuple[str, ...]:
        return self.weights.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def read(
        self, name: str, *, dtype: torch.dtype | None = None, rows: Ranges | None = None, columns: Ranges | None = None
    ) -> Tensor:
        return self.weights.read(name, dtype=dtype, rows=rows, columns=columns).to(self.device)

    def rows(self, name: str, ids: Sequence[int], *, dtype: torch.dtype | None = None) -> Tensor:
        return self.weights.rows(name, ids, dtype=dtype).to(self.device)
