"""What can be done with a model of each family."""

from dataclasses import dataclass

from transformers import CONFIG_MAPPING

from potluck.models.families import FAMILIES
from potluck.models.families.decoder import Decoder

_SEQUENCE = ("sequence-classification", "sequence-regression")
_SCHEMES = ("one-shot", "l-shaped", "u-shaped")
_STRATEGIES = ("single", "tensor", "tensor-uniform", "pipeline", "pipeline-uniform", "data")


@dataclass(frozen=True)
class FamilyInfo:
    """One family, as its default configuration has it."""

    model_type: str
    """As ``config.json`` calls it."""
    tasks: tuple[str, ...]
    strategies: tuple[str, ...]
    schemes: tuple[str, ...]
    """Of split training."""
    fused: tuple[str, ...]
    """Linears that give what other families have several for."""
    tied: bool
    """Whether the head is the embedding."""
    note: str
    """What is special; empty if nothing."""


def families() -> list[FamilyInfo]:
    """All families, by name."""
    return [_info(model_type, FAMILIES[model_type](CONFIG_MAPPING[model_type]())) for model_type in sorted(FAMILIES)]


def _info(model_type: str, decoder: Decoder) -> FamilyInfo:
    names = decoder.names
    fused = [
        name for name, whole in ((names.qkv[0], len(names.qkv) == 1), (names.into[0], _joins_gate(decoder))) if whole
    ]
    return FamilyInfo(
        model_type,
        tasks=(*(() if decoder.bidirectional else ("causal-lm",)), *(_SEQUENCE if names.classifier else ())),
        strategies=_STRATEGIES,
        schemes=() if decoder.bidirectional else _SCHEMES,
        fused=tuple(fused),
        tied=decoder.tied,
        note="a pipeline divides it between blocks only" if decoder.links_together > 1 else "",
    )


def _joins_gate(decoder: Decoder) -> bool:
    return decoder.gated and len(decoder.names.into) == 1
