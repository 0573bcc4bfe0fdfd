"""``pipeline``: every device walks some consecutive links whole, its stage; micro-batches follow each other.

Between two stages travels the residual stream ``[B, S, D]`` and, where something is trained before the border, its
gradient back. Stages walk in the order of 1F1B (``schedule``). Token ids (and their segments, in families that have
several) go to the first stage, which embeds them, and labels to the last, which has the whole head: ``pipeline`` moves
data. Where the head is the embedding, and trained, both stages have it: once a step the last one sends its gradients to
the first, which steps the rows and sends them back.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from potluck.chain.comm import Comm
from potluck.chain.heads import head_loss_alone
from potluck.chain.piece import At
from potluck.chain.ranges import Ranges
from potluck.chain.trained_embedding import TrainedEmbedding
from potluck.chain.trained_head import TrainedHead
from potluck.chain.whole import Whole
from potluck.models.build import Part
from potluck.pool.gather import gather_named
from potluck.pool.gradients import Held
from potluck.pool.halves import Half, deal
from potluck.pool.micro_batch import MicroBatch
from potluck.pool.reduce import pass_from_homes, reduce_to_homes
from potluck.pool.strategies.boxes import Delivery, Inbox, Outbox
from potluck.pool.strategies.schedule import one_forward_one_backward

_STREAM, _GRADIENT, _IDS, _LABELS, _SEGMENTS = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class Place:
    """One device's place along the chain."""

    ranks: tuple[int, ...]
    """Of all devices, the first stage's first."""
    stage: int

    @classmethod
    def of(cls, links: Sequence[Ranges], rank: int) -> "Place":
        """Where ``rank`` stands, given every rank's links."""
        ranks = sorted(range(len(links)), key=lambda each: links[each].spans)
        return cls(tuple(ranks), ranks.index(rank))

    @property
    def before(self) -> int | None:
        """Rank of the stage before this one."""
        return self.ranks[self.stage - 1] if self.stage else None

    @property
    def after(self) -> int | None:
        """Rank of the stage after this one."""
        return self.ranks[self.stage + 1] if self.stage + 1 < len(self.ranks) else None


class Pipeline:
    """See :class:`potluck.pool.strategies.strategy.Strategy`.

    Other than elsewhere, a device lists the trained tensors of its own stage alone: they are whole there and nobody
    else has them, so nothing of them is summed or spread, but for a table that is at both ends of the chain.
    """

    def __init__(self, part: Part, comm: Comm, links: Sequence[Ranges], *, checkpointing: bool, seed: int) -> None:
        """Prepare this device's walks; all devices do so together.

        Args:
            part: this rank's links, whole; the last stage's has all rows of the head.
            comm: the messages.
            links: of each rank, one range; all ranges make the whole chain, and give the order of the stages.
            checkpointing: recompute each link in the backward walk.
            seed: from which masks of dropout follow.

        Raises:
            DeviceLost: another device ended.
        """
        self.part, self.comm, self.seed = part, comm, seed
        self.place = Place.of(links, comm.rank)
        trained = part.chain.trained
        self.module = Whole(part.chain, checkpointing=checkpointing)
        told = torch.tensor([bool(trained), isinstance(part.head, TrainedHead)])
        trains, has_trained_head = comm.all_gather(told).wait().T.tolist()
        self.trained_before = any(trains[rank] for rank in self.place.ranks[: self.place.stage])
        """Whether a stage before this one wants a gradient."""
        self._ends = sorted({self.place.ranks[0], self.place.ranks[-1]})
        at_both_ends = self._table() if any(has_trained_head) and len(self._ends) > 1 else None
        self.held = [
            Held(
                replace(t, dim=None, held=(), gradient="cut"), self.place.ranks[0] if t.local is at_both_ends else None
            )
            for t in trained
        ]
        self._shared = [h for h in self.held if h.home is not None]

    def walk(self, micro_batches: Sequence[MicroBatch], step: int, step_targets: int) -> Tensor:
        """Walk the micro-batches in the order of 1F1B."""
        stage = _Step(self, micro_batches, step, step_targets)
        for direction, m in one_forward_one_backward(self.place.stage, len(self.place.ranks), len(micro_batches)):
            if direction == "forward":
                stage.forward(m)
            else:
                stage.backward(m)
        loss = stage.end()
        reduce_to_homes(self._shared, self._ends, self.comm)
        return loss

    def spread(self) -> None:
        """A table at both ends of the chain, from the first stage to the last."""
        pass_from_homes(self._shared, self._ends, self.comm)

    def whole(self) -> Iterator[tuple[str, Tensor]]:
        """Bring the trained tensors to rank 0, stage after stage."""
        own = [(h.trained.name, h.trained.local) for h in self.held if h.home in (None, self.comm.rank)]
        return gather_named(own, self.comm, self.place.ranks)

    def _table(self) -> Tensor | None:
        """The embedding of a first stage, the head of a last one."""
        embedding, head = self.part.embedding, self.part.head
        if isinstance(head, TrainedHead):
            return head.table.W_VD
        return embedding.tokens.W_VD if isinstance(embedding, TrainedEmbedding) else None


@dataclass
class _Visit:
    """What a micro-batch leaves between its two walks."""

    x_BSD: Tensor
    out: GradientEdge
    out_grad: Tensor | None
    """Where the loss is computed."""
    ids_BS: Tensor | None = None
    types_BS: Tensor | None = None
    """Both where the stream begins."""


class _Step:
    """One stage's walks of one step."""

    def __init__(self, pipeline: Pipeline, micro_batches: Sequence[MicroBatch], step: int, step_targets: int) -> None:
        """Ask for the first contents; an owner sends ids and labels where they are needed."""
        self._pipeline, self._step, self._step_targets = pipeline, step, step_targets
        comm, place, part = pipeline.comm, pipeline.place, pipeline.part
        self._wholes = [deal(each.layout, each.batch, 1)[0] for each in micro_batches]
        owners = [each.owner for each in micro_batches]
        ids_BS, labels_N = [each.ids_BS for each in self._wholes], [each.targets_N for each in self._wholes]
        shapes_BS = [each.shape_BS for each in self._wholes]
        shapes_N = [(each.positions_N.numel(),) for each in self._wholes]
        self._ids = Delivery(comm, owners, ids_BS, shapes_BS, place.ranks[0], _IDS)
        self._labels = Delivery(comm, owners, labels_N, shapes_N, place.ranks[-1], _LABELS)
        self._segments = None
        if part.segments:
            types_BS = [_types(each) for each in self._wholes]
            self._segments = Delivery(comm, owners, types_BS, shapes_BS, place.ranks[0], _SEGMENTS)
        shapes_BSD = [(B, S, part.hidden_size) for B, S in shapes_BS]
        self._x_in = self._x_out = self._gradients_in = self._gradients_out = None
        ahead = len(place.ranks) - place.stage  # by so many walks at most is this stage ahead of one beside it
        if place.before is not None:
            self._x_in = Inbox(comm, place.before, _STREAM, shapes_BSD, part.stream)
            if pipeline.trained_before:
                self._gradients_out = Outbox(comm, place.before, _GRADIENT, most=ahead + 1)
        if place.after is not None:
            self._x_out = Outbox(comm, place.after, _STREAM, most=ahead)
            if pipeline.trained_before or part.chain.trained:
                self._gradients_in = Inbox(comm, place.after, _GRADIENT, shapes_BSD, part.stream)
        self._visits: dict[int, _Visit] = {}
        self._loss = torch.zeros((), dtype=torch.float64)

    def forward(self, m: int) -> None:
        """Walk one micro-batch forward, and send what comes out or compute the loss."""
        pipeline, part, whole = self._pipeline, self._pipeline.part, self._wholes[m]
        ids_BS = types_BS = None
        if self._x_in is None:
            ids_BS, types_BS = self._ids.take(m), None if self._segments is None else self._segments.take(m)
            x_BSD = part.embedding(ids_BS, part.stream, types_BS)
        else:
            x_BSD = self._x_in.take().to(part.stream)
        x_BSD.requires_grad_(pipeline.trained_before or bool(part.chain.first_trained))
        is_last = self._x_out is None
        at = At(pipeline.seed, self._step, m, 0, lengths_B=whole.lengths_B)
        out: Tensor = pipeline.module(x_BSD, whole.positions_N if is_last else None, at)
        out_grad = None
        if self._x_out is None:
            out_grad = self._loss_gradient(out.detach(), self._labels.take(m))
        else:
            self._x_out.put(out)
        if out.requires_grad:  # not where a head alone is trained
            self._visits[m] = _Visit(x_BSD, get_gradient_edge(out), out_grad, ids_BS, types_BS)

    def backward(self, m: int) -> None:
        """Walk one micro-batch back, adding to gradients of what is trained, and send what remains."""
        visit = self._visits.pop(m, None)
        if visit is None:
            return
        out_grad = visit.out_grad
        if self._gradients_in is not None:
            out_grad = self._gradients_in.take().to(self._pipeline.part.stream)
        assert out_grad is not None
        torch.autograd.backward([visit.out], [out_grad])
        if self._gradients_out is not None:
            assert visit.x_BSD.grad is not None
            self._gradients_out.put(visit.x_BSD.grad)
        embedding = self._pipeline.part.embedding
        if isinstance(embedding, TrainedEmbedding) and visit.ids_BS is not None and visit.x_BSD.grad is not None:
            embedding.add_gradient(visit.x_BSD.grad, visit.ids_BS, visit.types_BS)

    def end(self) -> Tensor:
        """Wait until everything has left; this device's part of the loss."""
        for box in (self._ids, self._segments, self._labels, self._x_out, self._gradients_out):
            if box is not None:
                box.empty()
        return self._loss

    def _loss_gradient(self, h_ND: Tensor, labels_N: Tensor) -> Tensor:
        """``[N, D]``, of the last hidden states of supervised positions."""
        head = self._pipeline.part.head
        loss, gradient_ND = head_loss_alone(head, h_ND, labels_N, self._step_targets)
        self._loss += loss.double()
        return gradient_ND


def _types(half: Half) -> Tensor | None:
    """Segments where ids are owned."""
    if half.ids_BS is None:
        return None
    return torch.zeros_like(half.ids_BS) if half.types_BS is None else half.types_BS
