"""Which linears an adapter is put on."""

from collections.abc import Sequence

from potluck.errors import BadInput

_TABLES = ("lm_head", "embed_tokens", "embed_positions", "embed_in", "embed_out", "wte", "wpe")


def match_targets(targets: Sequence[str], linears: Sequence[str], frozen: Sequence[str] = ()) -> frozenset[str]:
    """The full names of the linears that ``targets`` name, as PEFT matches them: a whole name or its last parts.

    Args:
        targets: ``all-linear`` or names such as ``q_proj``, ``mlp.down_proj``, ``model.layers.3.mlp.up_proj``.
        linears: full names of the model's linears that can be trained, the head left out.
        frozen: full names of those that are frozen with their blocks.

    Raises:
        BadInput: a target is the head, matches frozen linears only, or nothing (names the linears there are).
    """
    matched: set[str] = set()
    for target in targets:
        if target == "all-linear":
            return frozenset(linears)
        if target.split(".")[-1] in _TABLES:
            raise BadInput(
                f"lora.targets: '{target}' cannot be trained: the embeddings and the head they may be tied to stay"
                " frozen, so that token ids and labels stay with their owner."
            )
        found = _matching(target, linears)
        if not found:
            if _matching(target, frozen):
                if not linears:  # a head alone is trained
                    continue
                raise BadInput(
                    f"lora.targets: '{target}' matches linears of frozen blocks only: lower frozen_blocks, or leave it"
                    " out."
                )
            known = sorted({name.split(".")[-1] for name in (*linears, *frozen)})
            raise BadInput(
                f"lora.targets: '{target}' matches no linear of this model. There are: {', '.join(known)},"
                " or all-linear."
            )
        matched |= found
    return frozenset(matched)


def _matching(target: str, linears: Sequence[str]) -> set[str]:
    return {name for name in linears if name == target or name.endswith("." + target)}
