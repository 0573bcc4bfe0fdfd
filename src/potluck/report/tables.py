"""Who holds what, and how well it went, as tables."""

from collections.abc import Sequence

from rich.table import Table

from potluck.pool.plan import Plan
from potluck.pool.result import Result
from potluck.report.holdings import holdings


def plan_table(plan: Plan, weights_mib: Sequence[float]) -> Table:
    """What each device holds, and the MiB of weights it comes to."""
    table = Table(title=f"Who holds what ({plan.strategy})", title_justify="left")
    table.add_column("device")
    held = holdings(plan)
    for unit in (*held, "weights"):
        table.add_column(unit.replace("\n", " "), justify="right")
    for device, mib, *cells in zip(plan.devices, weights_mib, *held.values(), strict=True):
        table.add_row(device.name, *cells, f"{mib:,.0f} MiB")
    return table


def result_table(result: Result) -> Table:
    """Each device's time and memory over the run."""
    table = Table(title="How the time went", title_justify="left")
    table.add_column("device")
    for column in ("computing", "waiting for others", "messages", "peak memory"):
        table.add_column(column, justify="right")
    for device in result.devices:
        total = (device.compute_s + device.wait_s + device.transfer_s) or 1.0
        shares = (f"{part / total:.0%}" for part in (device.compute_s, device.wait_s, device.transfer_s))
        table.add_row(device.name, *shares, f"{device.peak_rss_mib:,.0f} MiB")
    return table
