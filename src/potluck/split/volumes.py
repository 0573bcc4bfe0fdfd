"""What each scheme sends, counted beforehand: the formula that the counters of real runs are held against."""

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.job_sections import Split
from potluck.split.encoding import bytes_per_table_row, record_bytes
from potluck.split.messages import gradient_dtype

_ADAPTER_BYTES = 4


@dataclass(frozen=True)
class Load:
    """One client's examples in one message, or in its contribution."""

    examples: int = 0
    tokens: int = 0
    """Positions, one fewer than tokens in each example."""
    targets: int = 0
    """Supervised positions."""
    rows: int | None = None
    """Activations that are sent, where equal prefixes are sent once (one-shot); None for ``tokens`` of them."""
    shards: int = 1


@dataclass(frozen=True)
class Volume:
    """Bytes of one client, by kind of message, as :class:`potluck.split.traffic.Traffic` names them."""

    up: dict[str, int]
    down: dict[str, int]

    @property
    def total(self) -> int:
        """Of both directions."""
        return sum(self.up.values()) + sum(self.down.values())

    def __add__(self, other: "Volume") -> "Volume":
        return Volume(_sum(self.up, other.up), _sum(self.down, other.down))


def step_bytes(split: Split, hidden_size: int, load: Load) -> Volume:
    """What one client sends and receives in one step of a step scheme, its share of averaging aside.

    With T positions, N of them supervised, r bytes a row of activations (:func:`potluck.split.encoding.bytes_per_row`),
    and g bytes a number of a gradient (4 in fp32, else 2), lengths and outlier channels aside:

    | | up | down |
    |---|---|---|
    | l-shaped, frozen | T·r + T/8 + 4N | |
    | l-shaped, trainable | T·r + T/8 + 4N | T·D·g |
    | u-shaped, frozen | T·r + T/8 + N·D·g | N·D·g |
    | u-shaped, trainable | T·r + T/8 + N·D·g | N·D·g + T·D·g |
    """
    if not load.examples:
        return Volume({}, {})
    labels = split.scheme != "u-shaped"
    volume = _records(split, hidden_size, load, labels=labels)
    row = hidden_size * gradient_dtype(split.encoding).itemsize
    if not labels:
        volume += Volume({"output gradient": load.targets * row}, {"output": load.targets * row})
    if split.client == "trainable":
        volume += Volume({}, {"cut gradient": load.tokens * row})
    return volume


def scheme_bytes(
    split: Split,
    hidden_size: int,
    steps: Sequence[Load],
    held_out: Load | None = None,
    *,
    table_rows: int = 0,
    negatives: int = 0,
    adapter_parameters: int = 0,
) -> Volume:
    """Payload of one client over a whole training; headers, invites, the model and the result aside.

    - one-shot: activations, lengths and targets of the contribution, once, whatever the number of epochs
      (:func:`potluck.split.encoding.record_bytes`), those held out too; table and negatives.
    - step schemes: :func:`step_bytes` of every step; held-out examples twice (before and after training), in the
      u-shape with their outputs down; trainable clients' adapters up and down every ``average_every`` steps and after
      the last one; table and negatives once, in the l-shape where targets are ``embeddings``.

    Args:
        split: the job's.
        hidden_size: D.
        steps: this client's examples in each step, an empty load where it has none; in one-shot the one contribution.
        held_out: of this client; in step schemes as one message.
        table_rows: its distinct targets.
        negatives: rows that it draws.
        adapter_parameters: trained numbers of the client's part.
    """
    volume = Volume({}, {})
    if split.targets == "embeddings" and split.scheme != "u-shaped":
        row = bytes_per_table_row(split.encoding, hidden_size)
        volume += Volume({"table": table_rows * row, "negatives": negatives * row}, {})
    if split.scheme == "one-shot":
        for load in steps:
            volume += _records(split, hidden_size, load, labels=True)
        if held_out is not None:
            held = _records(split, hidden_size, held_out, labels=True)
            volume += Volume({"targets": held.up["targets"], "held-out activations": held.up["activations"]}, {})
        return volume
    for load in steps:
        volume += step_bytes(split, hidden_size, load)
    if held_out is not None:
        up = _records(split, hidden_size, held_out, labels=split.scheme != "u-shaped").total
        row = hidden_size * gradient_dtype(split.encoding).itemsize
        volume += Volume({"judging": 2 * up}, {"judging": 2 * held_out.targets * row * (split.scheme == "u-shaped")})
    if split.client == "trainable":
        averaged = -(-len(steps) // split.average_every) * adapter_parameters * _ADAPTER_BYTES
        volume += Volume({"adapter": averaged}, {"adapter": averaged})
    return volume


def _records(split: Split, hidden_size: int, load: Load, *, labels: bool) -> Volume:
    """Activations with lengths and scales; supervised bits, and the targets' indices or ids where ``labels`` go up."""
    targets = 4 * load.targets * labels
    whole = record_bytes(
        split.encoding,
        hidden_size,
        rows=load.tokens if load.rows is None else load.rows,
        tokens=load.tokens,
        examples=load.examples,
        targets=load.targets * labels,
        shared=load.rows is not None and load.rows < load.tokens,
        shards=load.shards,
    )
    told = targets + -(-load.tokens // 8)
    return Volume({"activations": whole - told, "targets": told}, {})


def _sum(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {kind: a.get(kind, 0) + b.get(kind, 0) for kind in (*a, *(kind for kind in b if kind not in a))}
