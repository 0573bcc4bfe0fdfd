"""``potluck families``: which models can be trained."""

from dataclasses import asdict

from potluck.cli.output import Debug, Json, console, print_json


def command(as_json: Json = False, debug: Debug = False) -> None:
    """List the families of models, by the ``model_type`` of config.json, and what each can be used with."""
    from potluck.models.families.listing import families
    from potluck.report.families import families_table

    listed = families()
    screen = console(as_json)
    screen.print(families_table(listed))
    for family in listed:
        if family.note:
            screen.print(f"{family.model_type}: {family.note}.", highlight=False)
    if as_json:
        print_json({"families": [asdict(family) for family in listed]})
