"""The head, cut over vocabulary rows, and the cross-entropy whose labels stay with their owner.

For one position with hidden state ``h`` and target ``y``, ``loss = log sum_v exp(h.w_v) - h.w_y``. Each device has some
rows ``w_v``. It computes, without any label,

    m = max_v h.w_v,   s = sum_v exp(h.w_v - m),   g = sum_v exp(h.w_v - m) w_v

and sends ``(m, s)``. With every device's pair, ``log Z`` is known, and ``exp(m - log Z) g`` is this device's part of
the gradient of ``log Z``: the logits are never kept. The owner alone reads ``w_y``, takes ``h.w_y`` from the loss and
``w_y`` from its part of the gradient. A device without rows sends ``m = -inf, s = 0``. The parts are then summed.
A soft-cap ``c tanh(l / c)`` on logits multiplies each row's term by its derivative. A row that stands for several
others counts as often as its shift says: ``exp(l + shift)``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.embedding import ReadRows

CHUNK_BYTES = 16 << 20
"""Of logits computed at once."""


@dataclass(frozen=True)
class Head:
    """This device's vocabulary rows of the frozen head."""

    W_VD: Tensor
    softcap: float | None = None
    chunk_bytes: int = CHUNK_BYTES
    """Logits computed at once."""
    shift_V: Tensor | None = None
    """Added to the soft-capped logits in ``log Z``; a target's own logit is never shifted."""

    def partial(self, h_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``m [N]``, ``s [N]`` and ``g [N, D]`` of the module's text, in float32 or better."""
        exact = torch.promote_types(h_ND.dtype, torch.float32)
        V, D = self.W_VD.shape
        N = h_ND.shape[0]
        m_N, s_N = h_ND.new_full((N,), -torch.inf, dtype=exact), h_ND.new_zeros(N, dtype=exact)
        g_ND = h_ND.new_zeros(N, D, dtype=exact)
        if V == 0:
            return m_N, s_N, g_ND
        rows = max(1, self.chunk_bytes // (V * exact.itemsize))
        for start in range(0, N, rows):
            part = slice(start, start + rows)
            l_nV, slope_nV = capped(F.linear(h_ND[part], self.W_VD).to(exact), self.softcap)
            if self.shift_V is not None:
                l_nV = l_nV + self.shift_V
            m_N[part] = l_nV.amax(-1)
            e_nV = l_nV.sub_(m_N[part, None]).exp_()
            s_N[part] = e_nV.sum(-1)
            if slope_nV is not None:
                e_nV.mul_(slope_nV)
            g_ND[part] = e_nV.to(self.W_VD.dtype) @ self.W_VD
        return m_N, s_N, g_ND


@dataclass(frozen=True)
class Targets:
    """What only the owner has: the target of each supervised position, and the head's rows to look it up."""

    ids_halves: Sequence[Tensor]
    """Token ids; classes, or the bits of float64 values, where a :class:`potluck.chain.classifier.Classifier` reads."""
    rows: ReadRows


def cross_entropy(
    head: Head,
    h_halves: Sequence[Tensor],
    targets: Targets | None,
    step_targets: int,
    comm: Comm,
    weights: Sequence[Tensor] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Loss of the supervised positions and its gradient, both divided by the whole step's ``step_targets``.

    Args:
        head: this device's rows.
        h_halves: ``[1, N, D]`` normed last hidden states of each half's supervised positions, equal on all devices.
        targets: the owner's labels; None on every other device.
        step_targets: supervised positions of the step, over all micro-batches and devices.
        comm: the messages.
        weights: what each position of each half counts, equal on all devices; 1 if None.

    Returns:
        The owner's loss (0 elsewhere), and the gradient of each half's hidden states, equal on all devices.
    """
    supervised, partials, pairs = [], [], []
    for h_1ND in h_halves:
        h_ND = h_1ND[0]
        m_N, s_N, g_ND = head.partial(h_ND)
        supervised.append(h_ND)
        partials.append((m_N, g_ND))
        pairs.append(comm.all_gather(torch.stack((m_N, s_N))))
    loss = partials[0][0].new_zeros(())
    messages = []
    for j, (m_N, g_ND) in enumerate(partials):
        m_WN, s_WN = pairs[j].wait().unbind(1)
        log_Z_N = torch.logsumexp(m_WN + s_WN.log(), 0)
        g_ND.mul_((m_N - log_Z_N).exp_()[:, None])
        if targets is not None:
            ids_N = targets.ids_halves[j]
            loss_N = log_Z_N - _take_targets(head, supervised[j], ids_N, targets.rows, g_ND)
            loss += (loss_N if weights is None else loss_N * weights[j]).sum()
        if weights is not None:
            g_ND.mul_(weights[j][:, None])
        messages.append(comm.all_reduce(g_ND.div_(step_targets)))
    gradients = [message.wait().to(h.dtype)[None] for h, message in zip(h_halves, messages, strict=True)]
    return loss / step_targets, gradients


def loss_alone(head: Head, h_ND: Tensor, targets_N: Tensor, step_targets: int) -> tuple[Tensor, Tensor]:
    """:func:`cross_entropy` on a device that has the whole head and the labels: the loss, and its gradient ``[N, D]``.

    Args:
        head: all rows.
        h_ND: normed last hidden states of supervised positions.
        targets_N: their labels.
        step_targets: by which both are divided.
    """
    targets = Targets([targets_N], lambda ids: head.W_VD[ids])
    loss, (gradient_1ND,) = cross_entropy(head, [h_ND[None]], targets, step_targets, Comm())
    return loss, gradient_1ND[0]


def _take_targets(head: Head, h_ND: Tensor, ids_N: Tensor, rows: ReadRows, g_ND: Tensor) -> Tensor:
    """The target logits ``[N]``; their gradient is taken from ``g_ND`` in place."""
    unique, index_N = ids_N.unique(return_inverse=True)
    w_ND = rows(unique.tolist()).to(g_ND.device, g_ND.dtype)[index_N]
    raw_N = (h_ND.to(g_ND.dtype) * w_ND).sum(-1).to(head.W_VD.dtype)  # rounded as the same logit is in log Z
    l_N, slope_N = capped(raw_N.to(g_ND.dtype), head.softcap)
    g_ND.sub_(w_ND if slope_N is None else w_ND * slope_N[:, None])
    return l_N


def capped(logits: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Soft-capped logits and their derivative by the raw ones; None where that is 1."""
    if softcap is None:
        return logits, None
    squashed = torch.tanh(logits / softcap)
    return squashed * softcap, 1 - squashed * squashed
