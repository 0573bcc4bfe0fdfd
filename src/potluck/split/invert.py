"""Reading token ids out of what a client uploads, as anybody can who has the model.

A target is a row of a public table: the nearest row tells its id. An activation is read in two steps. A linear map,
fitted on activations of random tokens, turns it into something like its token's embedding, whose nearest rows are the
candidates. Each candidate then goes through the client part behind the tokens read before it, and is encoded as the
upload was: the right token behind the right tokens gives back the very activation that was sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from potluck.chain.piece import At
from potluck.split.encoding import Encoding, decode, decode_rows, encode, encode_rows
from potluck.split.parts import ClientPart

CERTAIN = 0.01
"""Mean squared difference, in units of each channel's variance, below which an activation counts as reproduced. The
right tokens leave about 0 (1e-3 where the client computed in bfloat16), a wrong one about 1."""

_AT = At(seed=0, step=0, micro_batch=0, half=0)
_TOKENS_AT_ONCE = 4096
_SEQUENCE = 64
_SAMPLES_A_CHANNEL = 16
_RIDGE = 1e-3
_FEW, _MANY = 16, 256
_TRIED = (8, 32, 96, _MANY)  # candidates a position tries, until one is right


@dataclass(frozen=True)
class Sent:
    """What was uploaded for one example."""

    x_TD: Tensor
    """float32, decoded."""
    outliers_C: Tensor | None
    """Channels its shard keeps beside the integers; None where the encoding has none."""

    def begin(self, positions: int) -> "Sent":
        """The first positions."""
        return Sent(self.x_TD[:positions], self.outliers_C)


@dataclass(frozen=True)
class Reading:
    """What was read out of one example's activations."""

    ids: tuple[int, ...]
    """A token id for each position."""
    certain: tuple[bool, ...]
    """Whether the ids up to here give back the activation that was sent."""


def nearest_rows(sent_UD: Tensor, table_VD: Tensor, encoding: Encoding) -> list[int]:
    """For each row that was sent, the id of the table's row that is nearest once it is encoded in the same way.

    Args:
        sent_UD: float32, decoded.
        table_VD: the model's whole table.
        encoding: of the contribution.
    """
    best_U = torch.full((len(sent_UD),), -torch.inf)
    found_U = torch.zeros(len(sent_UD), dtype=torch.int64)
    for start in range(0, len(table_VD), _TOKENS_AT_ONCE):
        rows_KD = decode_rows(encode_rows(table_VD[start : start + _TOKENS_AT_ONCE].float(), encoding))
        # |a - b|^2 without |a|^2, which is the same for all b
        near_U, at_U = (2 * sent_UD @ rows_KD.T - rows_KD.square().sum(1)).max(1)
        found_U = torch.where(near_U > best_U, start + at_U, found_U)
        best_U = torch.maximum(near_U, best_U)
    return found_U.tolist()


class Inverter:
    """Reads examples' activations; fitted once for a model, a cut and an encoding."""

    def __init__(
        self,
        part: ClientPart,
        table_VD: Tensor,
        encoding: Encoding,
        seed: int = 0,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Fit the linear maps.

        Args:
            part: the client's, of the public model.
            table_VD: the whole embedding table, float32.
            encoding: of the contribution.
            seed: of the random tokens.
            progress: told tokens done and tokens in all.
        """
        self._part = replace(part, embedding=replace(part.embedding, rows=lambda ids: table_VD[ids]))
        self._table_VD, self._encoding = table_VD, encoding
        self._mean_D, self._std_D = table_VD.mean(0), table_VD.std(0).clamp_min(1e-12)
        self._norm_V = ((table_VD - self._mean_D) / self._std_D).norm(dim=1).clamp_min(1e-12)
        V, D = table_VD.shape
        samples = _SAMPLES_A_CHANNEL * D
        draw = torch.Generator().manual_seed(seed)
        # the first position sees nothing but itself, and many models mark it with huge values: it has a map of its own
        first_B1 = torch.randint(V, (samples // 2, 1), generator=draw)
        others_BS = torch.randint(V, (-(-samples // _SEQUENCE), _SEQUENCE), generator=draw)
        total = first_B1.numel() + others_BS.numel()
        x_BD = self._streams(first_B1, lambda done: progress(done, total)).flatten(0, 1)
        x_BSD = self._streams(others_BS, lambda done: progress(first_B1.numel() + done, total))[:, 1:]
        self._first = self._fit(x_BD, first_B1.flatten())
        self._other = self._fit(x_BSD.flatten(0, 1), others_BS[:, 1:].flatten())
        self._scale_D = x_BSD.flatten(0, 1).std(0).clamp_min(1e-12)

    def read(self, sent: Sent) -> Reading:
        """The tokens of one example, in rounds.

        In a round, all positions whose activation is not given back yet try their first candidates at once, behind
        tokens most of which are right. What stands before the first of them is right for sure, so that it then tries
        all its candidates, and is settled.
        """
        candidates_TK = self._candidates(sent.x_TD)
        ids_T, settled = candidates_TK[:, 0].clone(), 0
        while True:
            open_T = self.distances(ids_T[None], sent)[0] > CERTAIN
            places = [place for place in open_T.nonzero().flatten().tolist() if place >= settled]
            if not places:
                return Reading(tuple(ids_T.tolist()), tuple((~open_T).tolist()))
            first = places[0]
            if len(places) > 1:
                tried_KT = ids_T.repeat(min(_FEW, candidates_TK.shape[1]), 1)
                tried_KT[:, places] = candidates_TK[places, :_FEW].T
                ids_T = self._best(tried_KT[:, : places[-1] + 1], sent, ids_T)
            self._settle(ids_T, first, candidates_TK[first], sent)
            settled = first + 1

    def _best(self, tried_KT: Tensor, sent: Sent, ids_T: Tensor) -> Tensor:
        """The ids with the nearest one tried at each position."""
        stop = tried_KT.shape[1]
        best_T = self.distances(tried_KT, sent.begin(stop)).argmin(0)
        return torch.cat((tried_KT[best_T, torch.arange(stop)], ids_T[stop:]))

    def _settle(self, ids_T: Tensor, place: int, candidates_K: Tensor, sent: Sent) -> None:
        """Put the nearest candidate at ``place``, behind the ids before it; most are among the first few."""
        nearest, start = torch.inf, 0
        for stop in _TRIED:
            some_K = candidates_K[start:stop]
            if len(some_K) == 0 or nearest <= CERTAIN:
                return
            tried_KT = ids_T[: place + 1].repeat(len(some_K), 1)
            tried_KT[:, place] = some_K
            distance, at = self.distances(tried_KT, sent.begin(place + 1))[:, place].min(0)
            if distance < nearest:
                nearest, ids_T[place] = float(distance), some_K[at]
            start = stop

    def distances(self, ids_BT: Tensor, sent: Sent) -> Tensor:
        """How far the activations of other token ids, encoded as these were, are from them: ``[B, T]``.

        The mean over channels of squared differences, each in units of its channel's variance.
        """
        x_ND = self._streams(ids_BT).flatten(0, 1)
        x_BTD = self._as_sent(x_ND, sent.outliers_C).view(*ids_BT.shape, -1)
        return ((x_BTD - sent.x_TD) / self._scale_D).square().mean(-1)

    def _as_sent(self, x_RD: Tensor, outliers_C: Tensor | None) -> Tensor:
        return decode(encode(x_RD, self._encoding, outliers_C), x_RD.shape[1])

    def _streams(self, ids_BS: Tensor, advance: Callable[[int], None] = lambda done: None) -> Tensor:
        """The stream at the cut, float32 ``[B, S, D]``, a few sequences at a time."""
        found = []
        at_once = max(1, _TOKENS_AT_ONCE // ids_BS.shape[1])
        with torch.no_grad():
            for some_KS in ids_BS.split(at_once):
                x_ND = self._part(some_KS, torch.arange(some_KS.numel()), _AT)
                found.append(x_ND.float().view(*some_KS.shape, -1))
                advance(sum(len(x) for x in found) * ids_BS.shape[1])
        return torch.cat(found)

    def _fit(self, x_ND: Tensor, ids_N: Tensor) -> "_Map":
        x_ND = self._as_sent(x_ND, None)
        mean_D, std_D = x_ND.mean(0), x_ND.std(0).clamp_min(1e-6)
        x_ND = (x_ND - mean_D) / std_D
        e_ND = (self._table_VD[ids_N] - self._mean_D) / self._std_D
        gram_DD = x_ND.T @ x_ND
        gram_DD.diagonal().add_(_RIDGE * len(x_ND))
        return _Map(mean_D, std_D, torch.linalg.solve(gram_DD, x_ND.T @ e_ND))

    def _candidates(self, x_TD: Tensor) -> Tensor:
        """For each position the token ids whose embeddings are most like the mapped activation, best first."""
        e_TD = torch.cat((self._first(x_TD[:1]), self._other(x_TD[1:]))) / self._std_D
        scores_TV = (e_TD @ self._table_VD.T - (e_TD @ self._mean_D)[:, None]) / self._norm_V
        indices_TK: Tensor = scores_TV.topk(min(_MANY, scores_TV.shape[1]), dim=1).indices
        return indices_TK


@dataclass(frozen=True)
class _Map:
    """A linear map from activations to standardised embeddings."""

    mean_D: Tensor
    std_D: Tensor
    W_DD: Tensor

    def __call__(self, x_ND: Tensor) -> Tensor:
        return (x_ND - self.mean_D) / self.std_D @ self.W_DD
