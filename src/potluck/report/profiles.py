"""A device's profile as a table."""

from rich.table import Table

from potluck.pool.profile import Line, Profile


def profile_table(profile: Profile) -> Table:
    """What was measured: milliseconds of a half-batch by units, and the line fitted through them; memory, threads."""
    machine, work = profile.machine, profile.work
    table = Table(
        title=f"{profile.device}: {machine.processor}, {machine.threads} of {machine.cores} cores\n"
        f"One block (or the head) forward and backward, {work.rows} x {work.length} tokens, {work.dtype}",
        title_justify="left",
    )
    table.add_column("piece")
    for column in ("units", "measured", "fitted"):
        table.add_column(column, justify="right")
    for piece, line in (
        ("attention, query heads", profile.attention_s),
        ("MLP, columns", profile.mlp_s),
        ("head, vocabulary rows", profile.head_s),
    ):
        _add_points(table, piece, line)
    table.add_section()
    for what, size in (("free memory", profile.available_bytes), ("potluck itself takes", profile.runtime_bytes)):
        table.add_row(what, "", f"{size / 2**20:,.0f} MiB", "")
    link = "not known" if profile.link is None else f"{profile.link.bytes_per_s * 8 / 1e6:,.0f} Mbit/s"
    table.add_row("link, as the network interface says", "", link, "")
    return table


def _add_points(table: Table, piece: str, line: Line) -> None:
    table.add_section()
    for i, (units, seconds) in enumerate(line.points):
        table.add_row("" if i else piece, f"{units:,}", f"{seconds * 1e3:,.1f} ms", f"{line(units) * 1e3:,.1f} ms")
