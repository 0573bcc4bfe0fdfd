"""What cannot be trained exactly when it is cut, and what to do then."""

from collections.abc import Sequence

from potluck.job_sections import Adapter
from potluck.models.families.decoder import Decoder
from potluck.models.targets import of_divided_rows


def divides_rows(adapter: Adapter | None, model: Decoder) -> str:
    """Why strategy ``tensor`` cannot train this adapter exactly on several devices, and what can; empty if it can."""
    divided = [] if adapter is None else of_divided_rows(adapter, model)
    if not divided:
        return ""
    return (
        "lora.use_dora norms whole rows of weights, and devices would each have a part of every row of"
        f" {' and '.join(_told_apart(divided))}. Leave these out of lora.targets, or take strategy 'single',"
        " 'pipeline' or 'data'."
    )


def _told_apart(names: Sequence[str]) -> list[str]:
    """Last parts of the names of a block's linears, if these are different."""
    ends = [name.rpartition(".")[2] for name in names]
    return ends if len(set(ends)) == len(ends) else list(names)
