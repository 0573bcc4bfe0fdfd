"""What the chain is fed: examples as token ids, and micro-batches of them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Example:
    """One training example."""

    ids: tuple[int, ...]
    """Token ids, first to last."""
    supervised: tuple[bool, ...]
    """For each token, whether it is a target: something the model must learn to say. The first token never is."""
    where: str
    """Its source for messages, as ``file:line``."""
    prompt_length: int
    """Tokens before the last run of targets: what generation is given."""
    answer: str | None
    """The text of that last run without special tokens; None for plain text, which has no answer to match."""
    label: float | None = None
    """Classification: the index of the class, an int. Regression: the value, a float. None where text is learnt."""
    reads_at: int | None = None
    """The position whose hidden state the classifier reads; None where text is learnt."""
    types: tuple[int, ...] | None = None
    """For each token, which text of a pair it is of, 0 or 1; None where all are of the first."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch, padded on the right. Only its owner has it; other devices see a :class:`Layout`."""

    ids_BS: Tensor
    """Token ids, int64, 0 where padded."""
    targets_N: Tensor
    """What each of the layout's positions is to give, int64, in their order: the token that follows, the index of the
    class, or the bits of a float64, which is the value."""
    layout: "Layout"
    types_BS: Tensor | None = None
    """Which text of a pair each token is of, int64, 0 where padded; None where all are of the first."""


@dataclass(frozen=True)
class Layout:
    """What devices without the data know of a micro-batch: lengths and supervised positions, no token."""

    lengths: tuple[int, ...]
    """Tokens of each of the B rows; S is the longest."""
    positions: tuple[tuple[int, ...], ...]
    """For each row, the positions (ascending) whose next token is a target, token ``p + 1`` of the row; or the one that
    the classifier reads."""
