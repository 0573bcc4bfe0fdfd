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
    joins_gate = decoder.gated and len(names.into) == 1
    return FamilyInfo(
        model_type,
        tasks=(*(() if decoder.bidirectional else ("causal-lm",)), *(_SEQUENCE if names.classifier else ())),
        strategies=_STRATEGIES,
        schemes=() if decoder.bidirectional else _SCHEMES,
        fused=(*(names.qkv if len(names.qkv) == 1 else ()), *(names.into if joins_gate else ())),
        tied=decoder.tied and not decoder.bidirectional,
        note="a pipeline divides it between blocks only" if decoder.links_together > 1 else "",
    )
