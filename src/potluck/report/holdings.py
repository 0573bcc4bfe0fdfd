"""What each device of a plan holds, in the units of its strategy."""

from potluck.chain.ranges import Ranges
from potluck.pool.plan import Plan


def holdings(plan: Plan) -> dict[str, list[str]]:
    """Columns of a table: a heading, perhaps of two lines, and a cell a device."""
    devices = plan.devices
    if all(device.links is not None for device in devices):
        return {
            "blocks": [blocks(device.links or Ranges(())) for device in devices],
            "head": ["whole" if device.vocab_rows else "" for device in devices],
        }
    if plan.strategy == "data":
        speeds = sum(device.speed for device in devices)
        return {"of the\nrows": [f"{device.speed / speeds:.0%}" if speeds else "its own" for device in devices]}
    return {
        "query\nheads": [f"{len(device.heads):,}" for device in devices],
        "MLP\ncolumns": [f"{len(device.columns):,}" for device in devices],
        "vocab\nrows": [f"{len(device.vocab_rows):,}" for device in devices],
    }


def blocks(links: Ranges) -> str:
    """Where a stage begins and ends, in blocks: ``0 to 3.5`` ends with attention of block 3, before its MLP."""
    if not links:
        return "none"
    return f"{links.spans[0][0] / 2:g} to {links.spans[-1][1] / 2:g}"
