"""Families of models as a table."""

from collections.abc import Sequence

from rich.table import Table

from potluck.models.families.listing import FamilyInfo


def families_table(families: Sequence[FamilyInfo]) -> Table:
    """What can be trained, in which ways."""
    table = Table(title="Models that potluck trains", title_justify="left")
    for column in ("model_type", "tasks", "strategies", "fused linears", "tied"):
        table.add_column(column)
    tasks = max((family.tasks for family in families), key=len)
    strategies = max((family.strategies for family in families), key=len)
    for family in families:
        fused = ", ".join(name.rpartition(".")[2] for name in family.fused) or "-"
        cells = (_of_all(family.tasks, tasks), _of_all(family.strategies, strategies), fused)
        table.add_row(family.model_type, *cells, "yes" if family.tied else "no")
    return table


def _of_all(some: Sequence[str], every: Sequence[str]) -> str:
    left_out = [name for name in every if name not in some]
    return f"all but {', '.join(left_out)}" if left_out else "all"
