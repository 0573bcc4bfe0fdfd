"""Which linears an adapter is put on."""

import re
from collections.abc import Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from potluck.errors import BadInput
from potluck.job_sections import IA3, Adapter
from potluck.models.families.decoder import Decoder

_NAMING = (
    "target_modules",
    "target_parameters",
    "exclude_modules",
    "modules_to_save",
    "layers_to_transform",
    "layers_pattern",
)
"""Fields of an adapter's configuration by which PEFT finds its linears."""
_TABLES = ("lm_head", "embed_tokens", "embed_positions", "embed_in", "embed_out", "wte", "wpe")


def targets_of(adapter: Adapter, decoder: Decoder) -> frozenset[str]:
    """The full names of the linears that a job's adapter is put on.

    Raises:
        BadInput: as :func:`match_targets`.
    """
    if not isinstance(adapter, IA3):
        return match_targets(adapter.targets, decoder.linears, decoder.frozen_linears)
    names = decoder.names
    usual = {*(names.qkv[1:] or names.qkv), names.out}
    auto = {name for name in decoder.linears if decoder.within_block(name) in usual}
    named = [target for target in adapter.targets if target != "auto"]
    matched = match_targets(named, decoder.linears, decoder.frozen_linears, "ia3.targets")
    return matched | auto if "auto" in adapter.targets else matched


def named_by(config: Mapping[str, Any], decoder: Decoder) -> list[str]:
    """The linears of blocks that an adapter's configuration names, in order, as PEFT finds them.

    Raises:
        BadInput: its names cannot be read.
    """
    from peft.tuners.tuners_utils import check_target_module_exists
    from peft.utils.constants import INCLUDE_LINEAR_LAYERS_SHORTHAND

    targets = config.get("target_modules")
    if targets is None:  # PEFT's own choice for the family, which it writes out when it saves
        return []
    if isinstance(targets, str) and targets.lower() == INCLUDE_LINEAR_LAYERS_SHORTHAND:
        return decoder.linears
    wanted = SimpleNamespace(**{field: config.get(field) for field in _NAMING})
    try:
        return [name for name in decoder.linears if check_target_module_exists(wanted, name)]
    except (TypeError, AttributeError, re.error):
        raise BadInput(
            "The adapter's configuration names linears (target_modules, layers_to_transform) in a way that cannot be"
            " read: copy the adapter again."
        ) from None


def of_divided_rows(adapter: Adapter, decoder: Decoder) -> list[str]:
    """What blocks call the linears whose adapters need whole rows of weights, and which a row cut divides.

    DoRA norms rows; a linear that is cut by its inputs, under strategy ``tensor``, has no whole ones.
    """
    if isinstance(adapter, IA3) or not adapter.use_dora:
        return []
    adapted = {decoder.within_block(name) for name in targets_of(adapter, decoder)}
    return [name for name, cut in decoder.cuts.items() if cut == "row" and name in adapted]


def names_apart(adapted: Collection[str], decoder: Decoder) -> tuple[list[str], list[str]]:
    """Names by which PEFT finds just these linears: those scaled on their outputs, and those scaled on their inputs.

    PEFT takes last parts of names: as few are given as tell a kind from the other and from what is not adapted.
    """
    classifier = decoder.names.classifier
    beside = [] if classifier is None else [name for name in (classifier.out, classifier.hidden) if name is not None]
    known = [*decoder.linears, *decoder.frozen_linears, *beside]
    of_outputs = [name for name in adapted if decoder.cuts[decoder.within_block(name)] == "column"]
    of_inputs = sorted(set(adapted) - set(of_outputs))
    return _shortest(of_outputs, known), _shortest(of_inputs, known)


def _shortest(wanted: Collection[str], known: Collection[str]) -> list[str]:
    others = set(known) - set(wanted)
    found = set()
    for name in wanted:
        parts = name.split(".")
        ends = (".".join(parts[-count:]) for count in range(1, len(parts) + 1))
        found.add(next(end for end in ends if not any(other.endswith(end) for other in others)))
    return sorted(found)


def match_targets(
    targets: Sequence[str], linears: Sequence[str], frozen: Sequence[str] = (), field: str = "lora.targets"
) -> frozenset[str]:
    """The full names of the linears that ``targets`` name, as PEFT matches them: a whole name or its last parts.

    Args:
        targets: ``all-linear`` or names such as ``q_proj``, ``mlp.down_proj``, ``model.layers.3.mlp.up_proj``.
        linears: full names of the model's linears that can be trained, the head left out.
        frozen: full names of those that are frozen with their blocks.
        field: of the job, for messages.

    Raises:
        BadInput: a target is the head, matches frozen linears only, or nothing (names the linears there are).
    """
    matched: set[str] = set()
    for target in targets:
        if target == "all-linear":
            return frozenset(linears)
        if target.split(".")[-1] in _TABLES:
            raise BadInput(
                f"{field}: '{target}' cannot be trained: the embeddings and the head they may be tied to stay"
                " frozen, so that token ids and labels stay with their owner."
            )
        found = _matching(target, linears)
        if not found:
            if _matching(target, frozen):
                if not linears:  # a head alone is trained
                    continue
                raise BadInput(
                    f"{field}: '{target}' matches linears of frozen blocks only: leave it out, or freeze fewer"
                    " (frozen_blocks; in split training, the client's: split.cut)."
                )
            known = sorted({name.split(".")[-1] for name in (*linears, *frozen)})
            raise BadInput(
                f"{field}: '{target}' matches no linear of this model. There are: {', '.join(known)}, or all-linear."
            )
        matched |= found
    return frozenset(matched)


def _matching(target: str, linears: Sequence[str]) -> set[str]:
    return {name for name in linears if name == target or name.endswith("." + target)}
