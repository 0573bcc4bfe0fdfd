"""How much each client counts in training, where no client may count more than a part of the whole."""

from collections.abc import Sequence

from potluck.errors import BadInput


def capped_weights(target_tokens: Sequence[int], cap: float | None) -> list[float]:
    """What one target token of each client counts, so that no client has more than ``cap`` of all weight.

    Clients below the cap keep weight 1. Those above share one limit ``l`` on ``tokens x weight`` with
    ``l = cap * (sum of the others + k l)``, ``k`` being their number.

    Raises:
        BadInput: so many clients cannot each have so little.
    """
    total = sum(target_tokens)
    if cap is None or all(tokens <= cap * total for tokens in target_tokens):
        return [1.0] * len(target_tokens)
    contributing = sum(tokens > 0 for tokens in target_tokens)
    if cap * contributing < 1 - 1e-9:
        raise BadInput(
            f"split.weight_cap is {cap:g}, but {contributing} clients have contributed: one of them must have at least "
            f"{1 / max(1, contributing):.3g} of the weight."
        )
    above: set[int] = set()
    limit = float("inf")
    while True:
        more = {i for i, tokens in enumerate(target_tokens) if tokens > limit or (not above and tokens > cap * total)}
        if more <= above:
            return [min(1.0, limit / tokens) if tokens else 1.0 for tokens in target_tokens]
        above |= more
        below = sum(tokens for i, tokens in enumerate(target_tokens) if i not in above)
        share_left = 1 - cap * len(above)
        limit = cap * below / share_left if share_left > 1e-12 else min(target_tokens[i] for i in above)
