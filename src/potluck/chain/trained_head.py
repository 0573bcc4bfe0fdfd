"""The head that is trained, as its table is the embedding's too: its rows get their gradients beside the hidden states.

For one position with hidden state ``h`` and target ``y``, ``p_v = exp(h.w_v - log Z)`` and row ``v``,

    d loss / d w_v = (p_v - [v = y]) h        d loss / d h = sum_v (p_v - [v = y]) w_v

(a soft-cap multiplies both by its derivative). Each device has some rows, and all have ids and labels, as row ``y`` is
trained where it is held. Only with ``log Z`` of all rows are the ``p_v`` known, so each chunk of logits is computed
twice, before and after the message of maxima and sums (``chain/loss.py``): they are never kept.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from potluck.chain.comm import Comm
from potluck.chain.loss import CHUNK_BYTES, Targets, capped
from potluck.chain.trained_embedding import Table


@dataclass(frozen=True)
class TrainedHead:
    """This device's rows of the head, in which it computes in the dtype of the hidden states."""

    table: Table
    softcap: float | None = None
    chunk_bytes: int = CHUNK_BYTES
    """Logits computed at once."""

    def sums(self, h_ND: Tensor, W_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Maxima ``m [N]`` and sums ``s [N]`` of this device's ``exp(logits - m)``; -inf and 0 without rows."""
        exact = self.table.W_VD.dtype
        m_N, s_N = h_ND.new_full((len(h_ND),), -torch.inf, dtype=exact), h_ND.new_zeros(len(h_ND), dtype=exact)
        for part in self._chunks(len(h_ND)):
            l_nV, _ = self._logits(h_ND[part], W_VD)
            m_N[part] = l_nV.amax(-1)
            s_N[part] = l_nV.sub_(m_N[part, None]).exp_().sum(-1)
        return m_N, s_N

    def differentiate(
        self, h_ND: Tensor, W_VD: Tensor, log_Z_N: Tensor, targets_N: Tensor, step_targets: int
    ) -> tuple[Tensor, Tensor]:
        """Add to the rows' ``.grad``, divided by ``step_targets``.

        Returns:
            The sum of the target logits that are here, float64, and this device's term of the hidden states' gradient
            ``[N, D]``, divided too.
        """
        exact = self.table.W_VD.dtype
        g_ND, said = h_ND.new_zeros(h_ND.shape, dtype=exact), torch.zeros((), dtype=torch.float64)
        gradient_VD = self.table.gradient()
        for part in self._chunks(len(h_ND)):
            l_nV, slope_nV = self._logits(h_ND[part], W_VD)
            mine_M, rows_M = self.table.find(targets_N[part])
            said += l_nV[mine_M, rows_M].double().sum()
            p_nV = l_nV.sub_(log_Z_N[part, None]).exp_()
            p_nV[mine_M, rows_M] -= 1
            if slope_nV is not None:
                p_nV.mul_(slope_nV)
            d_nV = p_nV.div_(step_targets).to(W_VD.dtype)
            g_ND[part] = d_nV @ W_VD
            if d_nV.dtype == exact:
                gradient_VD.addmm_(d_nV.T, h_ND[part].to(exact))
            else:
                gradient_VD += d_nV.T @ h_ND[part]
        return said, g_ND

    def _chunks(self, N: int) -> Iterator[slice]:
        V = len(self.table.W_VD)
        rows = max(1, self.chunk_bytes // (max(V, 1) * self.table.W_VD.itemsize))
        return (slice(start, start + rows) for start in range(0, N if V else 0, rows))

    def _logits(self, h_nD: Tensor, W_VD: Tensor) -> tuple[Tensor, Tensor | None]:
        return capped(F.linear(h_nD, W_VD).to(self.table.W_VD.dtype), self.softcap)


def trained_cross_entropy(
    head: TrainedHead, h_halves: Sequence[Tensor], targets: Targets, step_targets: int, comm: Comm
) -> tuple[Tensor, list[Tensor]]:
    """As :func:`potluck.chain.loss.cross_entropy`, with labels on all devices; the head's rows get gradients too.

    Returns:
        This device's term of the loss, float64, and the gradient of each half's hidden states, equal on all devices.
    """
    h_halves_ND = [h_1ND[0] for h_1ND in h_halves]
    W_VD = head.table.W_VD.detach().to(h_halves_ND[0].dtype)
    pairs = [comm.all_gather(torch.stack(head.sums(h_ND, W_VD))) for h_ND in h_halves_ND]
    loss = torch.zeros((), dtype=torch.float64)
    messages = []
    for h_ND, pair, targets_N in zip(h_halves_ND, pairs, targets.ids_halves, strict=True):
        m_WN, s_WN = pair.wait().unbind(1)
        log_Z_N = torch.logsumexp(m_WN + s_WN.log(), 0)
        said, g_ND = head.differentiate(h_ND, W_VD, log_Z_N, targets_N, step_targets)
        if comm.rank == 0:  # all know it, and one counts it
            loss += log_Z_N.double().sum()
        loss -= said
        messages.append(comm.all_reduce(g_ND))
    gradients = [message.wait().to(h.dtype)[None] for h, message in zip(h_halves, messages, strict=True)]
    return loss / step_targets, gradients
