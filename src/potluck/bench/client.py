"""One client of a comparison, as a process of its own: contributes over a link of a given rate, and tells what it took.

``python -m potluck.bench.client SPEC`` with a JSON object of ``invite`` (a file that holds it), ``data``, ``name``,
``model``, ``home``, ``link_mbit`` and ``send_ids``; prints one JSON object.
"""

import json
import sys
from pathlib import Path

from potluck.errors import PotluckError
from potluck.split.client import Client, contribute
from potluck.split.traffic import Traffic


def main() -> None:
    """Run a client as the first argument says."""
    spec = json.loads(sys.argv[1])
    home = Path(spec["home"])
    client = Client(name=spec["name"], model=spec["model"], send_ids=spec["send_ids"], home=home, spool=home / "spool")
    try:
        done = contribute(
            Path(spec["invite"]).read_text(encoding="utf-8").strip(),
            [spec["data"]],
            client,
            traffic=Traffic(spec["link_mbit"]),
        )
    except PotluckError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    print(json.dumps(done.to_json()))


if __name__ == "__main__":
    main()
