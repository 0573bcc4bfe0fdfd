"""What each device of ``tensor`` sends in a step, in bytes on the wire."""

from collections.abc import Collection, Sequence

from potluck.pool.task import Task


def bytes_sent(task: Task, names: Sequence[str], owners: Collection[str]) -> list[float]:
    """Count the messages of a step, as :class:`potluck.chain.comm.Comm` counts them when it sends them.

    A ring sends ``2 (n - 1) / n`` of what it reduces and ``n - 1`` times what it gathers; the source of a broadcast
    counts for its ``n - 1`` receivers: owners for embeddings, which they send in turn, homes for the values of trained
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
    between_pieces = 2 * (task.layers + task.mlp_layers) * ring * task.message_bytes
    of_head = (n - 1) * task.pair_bytes + ring * task.head_message_bytes
    once = ring * task.partial_bytes + (n - 1) / n * task.whole_bytes
    embeddings = walks / len(owning) * (n - 1) * task.message_bytes
    return [walks * (between_pieces + of_head) + once + embeddings * (name in owning) for name in names]
