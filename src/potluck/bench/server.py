"""The server of a comparison, as a process of its own: serves on this machine, trains, and leaves.

``python -m potluck.bench.server JOB HOME CLIENTS INVITE_FILE`` writes the invite for its clients to a file and prints
one JSON object.
"""

import json
import os
import sys
from pathlib import Path

from potluck.errors import PotluckError
from potluck.job import load_job
from potluck.models.memory import memory_mib
from potluck.split.listener import SplitListener
from potluck.split.serve import Serving, serve


class _Server(SplitListener):
    def __init__(self, invite_file: Path) -> None:
        self._invite_file = invite_file

    def invited(self, invite: str, scheme: str) -> None:
        """Hand the invite to the clients."""
        partial = self._invite_file.with_suffix(".partial")
        partial.write_text(invite, encoding="utf-8")
        partial.replace(self._invite_file)

    def step(self, step: int, steps: int, loss: float, step_s: float) -> None:
        """Say how far training is."""
        print(json.dumps({"step": step, "steps": steps, "loss": loss}), file=sys.stderr, flush=True)


def main() -> None:
    """Serve until training is done."""
    job_file, home, clients, invite_file = sys.argv[1:]
    serving = Serving(train_when=int(clients), address="127.0.0.1", home=Path(home))
    listener = _Server(Path(invite_file))
    try:
        outcome = serve(load_job(job_file), serving, listener=listener, until=lambda outcome: outcome is not None)
    except PotluckError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
    assert outcome is not None
    times = os.times()
    cpu_s = times.user + times.system
    print(json.dumps(outcome.to_json() | {"cpu_s": cpu_s, "peak_rss_mib": memory_mib("VmHWM")}))


if __name__ == "__main__":
    main()
