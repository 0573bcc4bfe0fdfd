"""A walk by the clock: what lies between two messages is one lap, and each link at each unit count has its own.

One chain holds an attention and an MLP link for every unit count that is measured, between two pairs of empty ones. It
is walked as training walks it, with two half-batches, by a :class:`Stopwatch` in place of messages. So tapes,
recomputation and their overheads are the real ones, and what slows the machine for a while slows all counts alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from potluck.chain.comm import Comm, Message
from potluck.chain.heads import AnyHead, head_loss, labels_alone
from potluck.chain.loss import Head
from potluck.chain.pace import Pace
from potluck.chain.piece import At, Chain, Link
from potluck.chain.ranges import Ranges
from potluck.chain.share import Share
from potluck.chain.walk import backward, forward
from potluck.job_sections import Adapter
from potluck.models.build import build_part
from potluck.models.families.decoder import Decoder
from potluck.models.precision import torch_dtype
from potluck.models.random_weights import RandomWeights
from potluck.models.targets import targets_of
from potluck.pool.measured_work import decoder_of_work
from potluck.pool.profile import Work

HEAD_WALKS = 2
"""Of each number of rows in a round: a step walks many blocks and one head, and both decide shares."""

_HALVES = 2
_EMPTY_LINKS = 2  # on each side of those measured


class Stopwatch(Comm):
    """A device alone, on which each message reads the clock.

    A paced device catches up at each message, so that all that measure themselves on one machine weigh on it as they
    will later; but what it counts are its own CPU seconds at its speed, not what it waited for a core.
    """

    def __init__(self, pace: Pace | None = None, clock: Callable[[], float] | None = None) -> None:
        super().__init__()
        self.laps: list[float] = []
        self._slowed = pace
        self._clock = clock or (time.perf_counter if pace is None else pace.clock)
        self._since = self._clock()

    def start(self) -> None:
        """Start a lap, and forget those before."""
        self.laps = []
        if self._slowed is not None:
            self._slowed.restart()
        self._since = self._clock()

    def lap(self) -> float:
        """End a lap and start the next; returns what the clock counted."""
        if self._slowed is not None:
            self._slowed.catch_up()
        now = self._clock()
        self.laps.append(now - self._since)
        self._since = now
        return self.laps[-1]

    def all_reduce(self, x: Tensor, *, exact: bool = False) -> Message:
        """``x``, copied as a message is before it leaves."""
        content = x.detach().clone()
        self.lap()
        return Message(self, None, content)

    def all_gather(self, x: Tensor) -> Message:
        """``x`` as that of the only device."""
        self.lap()
        return super().all_gather(x)


@dataclass(frozen=True)
class Samples:
    """What is walked: links at several unit counts, and the head at several numbers of rows."""

    chain: Chain
    attention: tuple[int, ...]
    """Query heads of the measured attention links."""
    mlp: tuple[int, ...]
    """Columns of the measured MLP links."""
    heads: dict[int, AnyHead]
    """By vocabulary rows; the one of whole sequences has none."""
    x_BSD: Tensor
    """The first residual stream."""
    supervised_N: Tensor
    checkpointing: bool

    @property
    def places(self) -> list[tuple[str, int]]:
        """Kind and units of the measured links, from the lowest up."""
        pairs = zip(self.attention, self.mlp, strict=True)
        return [place for heads, columns in pairs for place in (("attention", heads), ("mlp", columns))]

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights and adapters, each storage counted once."""
        tensors = [*tensors_in(self.chain), *tensors_in(self.heads[max(self.heads)])]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())


def make_samples(work: Work, attention: Sequence[int], mlp: Sequence[int], vocab_rows: Sequence[int]) -> Samples:
    """Links and heads with these counts of units, of random weights.

    ``attention`` and ``mlp`` are equally long and begin with 0.

    Raises:
        BadInput: the work's model cannot be used, or an adapter's target matches nothing.
    """
    model = decoder_of_work(work)
    adapter = None if work.adapter is None else adapter_of_a_block(work.adapter, model)
    decoder = replace(model, layers=model.layers[:1] * 2)  # the first lacks what a block adds of the one before
    weights = RandomWeights(decoder)
    compute = torch_dtype(work.dtype)

    def links(heads: int, columns: int, rows: int) -> tuple[tuple[Link, ...], Chain, AnyHead]:
        mine = Share(Ranges.of(0, heads), Ranges.of(0, columns), Ranges.of(0, rows))
        rest = Share(Ranges.of(heads, decoder.num_heads), Ranges.of(columns, decoder.intermediate_size), Ranges(()))
        part = build_part(weights, decoder, [mine, rest], 0, compute=compute, adapter=adapter, seed=0)
        return part.chain.links[2:], part.chain, part.head

    empty, ending, head = links(0, 0, max(vocab_rows))
    measured = [empty, *(links(h, c, 0)[0] for h, c in zip(attention[1:], mlp[1:], strict=True))]
    every = (*empty, *(link for pair in measured for link in pair), *empty)
    B, S, N = work.rows, work.length, work.supervised
    generator = torch.Generator().manual_seed(0)
    x_BSD = torch.randn(B, S, decoder.hidden_size, generator=generator).to(torch.promote_types(compute, torch.float32))
    return Samples(
        chain=Chain(every, ending.last, len(every), ending.last_trained),
        attention=tuple(attention),
        mlp=tuple(mlp),
        heads={rows: replace(head, W_VD=head.W_VD[:rows]) if isinstance(head, Head) else head for rows in vocab_rows},
        x_BSD=x_BSD,
        supervised_N=torch.arange(N) * (B * S) // N,
        checkpointing=work.checkpointing,
    )


def adapter_of_a_block(adapter: Adapter, decoder: Decoder) -> Adapter:
    """Adapters on all linears of a block that the job adapts in some block.

    Raises:
        BadInput: a target matches nothing.
    """
    names = {decoder.within_block(name) for name in targets_of(adapter, decoder)}
    return adapter.model_copy(update={"targets": sorted(names)})


@dataclass(frozen=True)
class Round:
    """One walk's laps, seconds, by kind and units; each the mean of the two half-batches."""

    forward_s: dict[tuple[str, int], float]
    backward_s: dict[tuple[str, int], float]
    head_s: dict[int, float]
    """Of the head with the last norm."""


def walk_round(samples: Samples, pace: Pace | None) -> Round:
    """Walk all samples forward and backward once."""
    watch = Stopwatch(pace)
    ats = [At(0, 0, 0, half) for half in range(_HALVES)]
    supervised = [samples.supervised_N] * _HALVES
    streams = [samples.x_BSD] * _HALVES
    watch.start()
    hidden, tapes = forward(samples.chain, streams, supervised, ats, watch, checkpointing=samples.checkpointing)
    last_s = watch.lap() / _HALVES
    forward_laps = _per_link(watch.laps, len(samples.chain.links))
    head_s, gradients = dict.fromkeys(samples.heads, 0.0), [torch.empty(0)]
    for _ in range(HEAD_WALKS):
        for rows, head in samples.heads.items():
            watch.start()
            # a head of sequences computes only where labels are, and they are few; they decide nothing of its time
            targets = None if isinstance(head, Head) else labels_alone(torch.zeros_like(samples.supervised_N))
            _, gradients = head_loss(head, hidden[:1], targets, len(samples.supervised_N), watch)
            watch.lap()
            head_s[rows] += sum(watch.laps) / HEAD_WALKS
    watch.start()
    backward(samples.chain, tapes, gradients * _HALVES, watch)
    # From the top down; the lowest trained link sends nothing where no norm is trained.
    backward_laps = _per_link(watch.laps, len(watch.laps) // _HALVES)
    last_s += backward_laps[0]  # of an empty link, on top of which only the last norm is
    for trained in samples.chain.trained:
        trained.local.grad = None
    top_down = list(reversed(samples.places))
    return Round(
        forward_s=dict(zip(samples.places, forward_laps[_EMPTY_LINKS:], strict=False)),
        backward_s=dict(zip(top_down, backward_laps[_EMPTY_LINKS:], strict=False)),
        head_s={rows: seconds + last_s for rows, seconds in head_s.items()},
    )


def kept_bytes(samples: Samples) -> dict[tuple[str, int], int]:
    """What one half-batch's tape keeps of each link from the forward to the backward walk, by kind and units."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(samples.chain)}
    kept: dict[int, int] = {}

    def count(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    watch = Stopwatch(clock=lambda: sum(kept.values()))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        _, (tape,) = forward(
            samples.chain,
            [samples.x_BSD],
            [samples.supervised_N],
            [At(0, 0, 0, 0)],
            watch,
            checkpointing=samples.checkpointing,
        )
    found = dict(zip(samples.places, (int(lap) for lap in watch.laps[_EMPTY_LINKS:]), strict=False))
    below = len(samples.chain.links) - len(tape.visits)
    for place, visit in zip(samples.places, tape.visits[_EMPTY_LINKS - below :], strict=False):
        found[place] += sum(tensor.nbytes for tensor in visit.contents or () if tensor is not None)
    return found


def tensors_in(holder: object) -> list[Tensor]:
    """All tensors reachable through dataclass fields and tuples, empty ones left out."""
    if isinstance(holder, Tensor):
        return [holder] if holder.numel() else []
    if isinstance(holder, tuple):
        return [tensor for item in holder for tensor in tensors_in(item)]
    fields = getattr(holder, "__dataclass_fields__", {})
    return [tensor for name in fields for tensor in tensors_in(getattr(holder, name))]


def _per_link(laps: Sequence[float], links: int) -> list[float]:
    return [sum(laps[k * _HALVES : (k + 1) * _HALVES]) / _HALVES for k in range(links)]
