"""The messages of a step of ``tensor``, in number and in bytes on the wire."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from potluck.pool.task import Task

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Messages:
    """What a group of ``n`` devices sends, in bytes on the wire; arrays over groups."""

    count: Floats
    """Messages of a step that no compute covers."""
    bytes: Floats
    """Of these together."""
    link_bytes: Floats
    """Of one message between two pieces."""
    pair_bytes: Floats
    """Of one head's maxima and sums, of which all but the last half-batch's may be covered."""


def messages(task: Task, world_size: Floats) -> Messages:
    """Count them; see :mod:`potluck.pool.cost` for the bytes."""
    n = world_size
    reduce, gather, spread = 2 * (n - 1) / n, n - 1, np.ceil(np.log2(n))
    shared_kv = 0 if task.group == 1 else np.minimum(n - 1, task.kv_heads)
    kv_messages = 2 if task.group > 1 and task.kv_trained_bytes else 0
    contents = task.tables.contents_bytes
    streams = reduce if contents else spread
    a_micro_batch = task.half_batches * (streams * task.message_bytes + reduce * task.head_message_bytes)
    a_micro_batch = a_micro_batch + spread * contents
    return Messages(
        # layouts, norm and loss, clocks: four; gradients: one; values: one a home
        count=task.micro_batches * (2 * task.half_batches + 1 + bool(contents))
        + (4 + bool(task.partial_bytes) + kv_messages)
        + n * bool(task.whole_bytes),
        bytes=task.micro_batches * (a_micro_batch + gather * task.pair_bytes)
        + reduce * (task.partial_bytes + 2 * shared_kv * task.kv_trained_bytes)
        + (n - 1) / n * task.whole_bytes,
        link_bytes=reduce * task.message_bytes,
        pair_bytes=gather * task.pair_bytes,
    )


def bytes_sent(task: Task, names: Sequence[str], owners: Collection[str]) -> list[float]:
    """Count the messages of a step, as :class:`potluck.chain.comm.Comm` counts them when it sends them.

    A ring sends ``2 (n - 1) / n`` of what it reduces and ``n - 1`` times what it gathers; the source of a broadcast
    counts for its ``n - 1`` receivers: owners for embeddings (or for ids, where all look rows of a trained table up
    together and sum them), which they send in turn, homes for the values of trained
    tensors, of which each has about as many. Layouts, norm, loss and clocks are too small to count, and so are sums of
    key/value heads that few devices share.

    Args:
        task: the step.
        names: of the devices, coordinator first.
        owners: names of those that have data, the coordinator always among them.
    """
    n = len(names)
    if n == 1:
        return [0.0]
    owning = {names[0], *owners}
    walks = task.micro_batches * task.half_batches
    ring = 2 * (n - 1) / n
    between_pieces = (task.layers + task.mlp_layers + task.messages_back) * ring * task.message_bytes
    of_head = (n - 1) * task.pair_bytes + ring * task.head_message_bytes
    once = ring * task.partial_bytes + (n - 1) / n * task.whole_bytes
    everyone = walks * (between_pieces + of_head) + once
    owners_send = walks * task.message_bytes
    if task.tables.contents_bytes:
        everyone += walks * ring * task.message_bytes
        owners_send = task.micro_batches * task.tables.contents_bytes
    return [everyone + owners_send * (n - 1) / len(owning) * (name in owning) for name in names]
